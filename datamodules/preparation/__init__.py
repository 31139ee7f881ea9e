"""Write shards from LongCrawl64 or from a corpus of texts."""
