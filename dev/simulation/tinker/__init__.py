"""A simulation of the server for the Tinker API, with clients that retry as the SDK does."""
