"""What the tests start and read: phones with real adbd, agents, databases, captures of real engines."""
