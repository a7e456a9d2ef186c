"""Files of an engine into the store: recognise, group, identify, write."""
