"""Make `orders.jsonl`: what does an order cost? The prices are known to the server alone."""

import json

from server import PRICES


def main() -> None:
    with open("orders.jsonl", "w") as file:
        for item, cost in PRICES.items():
            for count in range(2, 12):
                row = {
                    "prompt": f"What do {count} of the item {item} cost?",
                    "answer": str(count * cost),
                }
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
