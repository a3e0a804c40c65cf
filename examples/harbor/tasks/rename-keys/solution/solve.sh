#!/bin/bash
sed -i 's/"mail":/"email":/' people.json
