"""What things are called: closed documents, canonical JSON, digests, types and names."""
