"""How the host gets to phones: adb, forwards, and which of the states that lie a phone is in."""
