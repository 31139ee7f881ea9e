"""Write shards: LongCrawl64 or a corpus of texts, tokenized, cut into documents, resumable.

Import from the modules: a re-export here would load what `longhaul prepare` may not need.
"""
