// A matmul_all_reduce as a ring: one partial for each owner lies in its slot, and the ranks add to it one after the
// other, the owner last. The rest is as in reduce.pml.
#define RING
#define BUSY 254                                         // in work
#define added(number) ((RANKS + 1) * sequence + (number))  // so many ranks' products

#define previous ((_pid + RANKS - 1) % RANKS)
#ifdef FAULT_PREVIOUS_NOT_WAITED_FOR
#define wait_previous(owner) skip
#else
#define wait_previous(owner) posted_by(previous, owner, sequence) >= sequence
#endif

// The product for `owner` onto those of `number` ranks.
#ifdef FAULT_POSTED_BEFORE_ADDED
#define add(owner, number)                                         \
  atomic {                                                         \
    assert(number == 0 || sum_of(owner) == added(number));         \
    sum_of(owner) = BUSY;                                          \
    posted_by(_pid, owner, sequence) = sequence                    \
  };                                                               \
  atomic { assert(sum_of(owner) == BUSY); sum_of(owner) = added(number + 1) }
#else
#define add(owner, number)                                                               \
  atomic { assert(number == 0 || sum_of(owner) == added(number)); sum_of(owner) = BUSY }; \
  atomic { assert(sum_of(owner) == BUSY); sum_of(owner) = added(number + 1) };           \
  if                                                                                     \
  :: owner != _pid -> posted_by(_pid, owner, sequence) = sequence                        \
  :: else                                                                                \
  fi
#endif

#define add_own wait_previous(_pid); add(_pid, RANKS - 1)
#if RANKS == 3
#define add_peers                        \
  add((_pid + 2) % RANKS, 0);            \
  wait_previous((_pid + 1) % RANKS);     \
  add((_pid + 1) % RANKS, 1)
#else
#define add_peers add(1 - _pid, 0)
#endif
#ifdef FAULT_OWN_TILE_FIRST
#define add_all add_own; add_peers
#else
#define add_all add_peers; add_own
#endif

#include "reduce.pml"
