#!/bin/bash
named=0 unnamed=0
[ "$(sh /app/greet.sh Ada)" = "Hello, Ada!" ] && named=1
[ "$(sh /app/greet.sh)" = "Hello, world!" ] && unnamed=1
echo "{\"reward\": $((named * unnamed)), \"greets_by_name\": $named}" > /logs/verifier/reward.json
