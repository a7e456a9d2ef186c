"""What only a host can see of a phone: a long-lived shell that samples it, its log after a kill, its preparation."""
