"""Pages and files of the docs that are made from the code."""
