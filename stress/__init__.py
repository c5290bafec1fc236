"""What breaks servers: long random traffic, hostile bytes, clocks in the wrong hands. See README.md."""
