"""Pure state machines with an injected clock: admission slots and leases."""
