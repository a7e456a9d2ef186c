"""Generated from telemetry.proto by proto/generate.sh; not edited."""
