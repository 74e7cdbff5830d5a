"""What an SST file says of itself."""
