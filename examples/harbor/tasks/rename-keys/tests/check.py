import json

with open("/app/people.json") as file:
    people = json.load(file)
assert people == [
    {"name": "Ada", "email": "ada@example.org"},
    {"name": "Max", "email": "mail@example.org", "note": "mail"},
]
