"""Full shards inside a node, by FSDP2; the sparse exchange between nodes."""
