#!/bin/bash
echo 'echo "Hello, ${1:-world}!"' > greet.sh
