"""Put known faults into production on purpose; a check must find each of them."""
