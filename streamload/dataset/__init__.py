"""What is stored: urls, tar headers, grouping into samples, the index, and the shard writer."""
