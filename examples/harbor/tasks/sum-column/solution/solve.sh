#!/bin/bash
awk -F, 'NR > 1 { sum += $2 * $3 } END { print sum }' orders.csv > total.txt
