"""Several engines behind one address: routing, forwarding, metrics, resources."""
