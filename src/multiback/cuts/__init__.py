"""Stand-in leaves and deferred rows: infer first, back-propagate later, slice by slice."""
