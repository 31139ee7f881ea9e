"""The limit on open files of this process."""

import resource

# Shards, pipes of data workers, sockets, the files of a database.
_OF_A_RUN = 128
# Sockets of rank 0, counted with 2, 4 and 8 ranks: one of the store, one in each of two groups of
# Gloo, two of the watchdog. The usual limit, 1,024, is enough for 180 ranks.
_PER_RANK = 5


def check_open_files(ranks: int = 1) -> None:
    """Raise the limit to what a run of so many ranks needs.

    Raises:
        RuntimeError: the system does not allow as many.
    """
    wanted = _OF_A_RUN + _PER_RANK * (ranks - 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        by = f" by {ranks:,} ranks" if ranks > 1 else ""
        raise RuntimeError(
            f"found a limit of {hard:,} open files, wanted {wanted:,} or more{by}: ulimit -Hn"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
