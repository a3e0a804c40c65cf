#!/bin/bash
# `python3 -I`: the folder that the model worked in is not imported from.
if python3 -I /tests/check.py; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
