"""Many phones at once: draining, leases, queues, and what is known of each phone now."""
