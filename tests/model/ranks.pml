// What the models share: arrays indexed by rank and entry, and conditions on any or all ranks.
#ifndef RANKS
#define RANKS 2
#endif

// Element i of n that belong to a rank, in an array over all ranks.
#define at(rank, i, n) ((rank) * (n) + (i))
#define entry(rank, sequence) at(rank, (sequence) % ENTRIES, ENTRIES)

// `p` is the rank in the condition.
#if RANKS == 2
#define any(p) (p(0) || p(1))
#define all(p) (p(0) && p(1))
#else
#define any(p) (p(0) || p(1) || p(2))
#define all(p) (p(0) && p(1) && p(2))
#endif

// A statement, or two, for each peer.
#if RANKS == 2
#define for_each_peer(statement) statement(1 - _pid)
#else
#define for_each_peer(statement) statement((_pid + 1) % RANKS); statement((_pid + 2) % RANKS)
#endif
