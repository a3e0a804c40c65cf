"""Adapters for environments of other libraries, one file a library.

Each package is imported where it is used, so users of other environments need not install it.
"""
