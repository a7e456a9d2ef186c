"""One module a command (or family of commands), each with `register(app)`; `bmoe_collector.cli` lists them."""
