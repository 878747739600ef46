// Deaths: every survivor completes or names a rank that was killed, wherever that happened; leaving disturbs nobody.
#ifndef ENTRIES
#define ENTRIES 2
#endif
#include "ranks.pml"

#ifndef OPERATIONS
#define OPERATIONS 3
#endif
#define KILLS (RANKS - 1)
#define NOBODY RANKS

// A fused reduce-scatter: who has all partials may release and leave while its peers still wait for each other's.
#define posted_by(writer, owner) posted[at(entry(writer, sequence), owner, RANKS)]
byte published[RANKS * ENTRIES], posted[RANKS * ENTRIES * RANKS], released[RANKS * ENTRIES];
byte lost[RANKS];    // 1 + the rank; 0: none
bool gone[RANKS];    // its sockets are at EOF
bool killed[RANKS];  // and why: else it left by itself, done or after a loss
byte kills;

#define or_killed :: kills < RANKS - 1 -> atomic { kills++; killed[_pid] = true; gone[_pid] = true; goto end }
#define raise(flag, to) if :: flag = to or_killed fi

// What find_loss() sees in a wait for rank `from` in operation `of`. Looks at EOF before flags: those of a rank that is
// gone stay as they are, so that one condition is the same as one look after the other.
#ifdef FAULT_LEAVERS_REPORT_IGNORED
#define unreported(p) true
#else
#define unreported(p) (lost[p] == 0)
#endif
#define needed(p, from, op) (p != _pid && (p == from || released[entry(p, op)] < op))
#ifdef FAULT_NOT_LOOKED_AGAIN
#define lose(p, flag, at_least) found = p; goto fail
#else  // what a rank did before it was lost counts
#define lose(p, flag, at_least) found = p; if :: flag >= at_least -> break :: else -> goto fail fi
#endif
#if defined(FAULT_EOF_IGNORED)
#define if_gone(p, flag, at_least, from, op)
#elif defined(FAULT_EOF_SEEN_LAST)
#define if_gone(p, flag, at_least, from, op) \
  :: needed(p, from, op) -> if :: gone[p] && unreported(p) -> lose(p, flag, at_least) :: else fi
#else
#define if_gone(p, flag, at_least, from, op) \
  :: gone[p] && unreported(p) && needed(p, from, op) -> lose(p, flag, at_least)
#endif
#define if_lost(p, flag, at_least, from, op)           \
  :: lost[p] != 0 -> lose(lost[p] - 1, flag, at_least) \
  if_gone(p, flag, at_least, from, op)

inline wait(flag, at_least, from, op) {
  do
  :: flag >= at_least -> break
  if_lost(0, flag, at_least, from, op)
  if_lost(1, flag, at_least, from, op)
#if RANKS > 2
  if_lost(2, flag, at_least, from, op)
#endif
  or_killed
  od;
  found = NOBODY
}

#define wait_entry(p) wait(released[entry(p, sequence)], sequence - ENTRIES, p, sequence - ENTRIES)
#define wait_header(p) wait(published[entry(p, sequence)], sequence, p, sequence)
#define post(p) raise(posted_by(_pid, p), sequence)
#define wait_partial(p) wait(posted_by(p, _pid), sequence, p, sequence)

active [RANKS] proctype rank() {
  byte sequence, found = NOBODY;
  do
  :: sequence < OPERATIONS ->
     sequence++;
     if
     :: sequence > ENTRIES -> for_each_peer(wait_entry)
     :: else
     fi;
     raise(published[entry(_pid, sequence)], sequence);
     for_each_peer(wait_header);
     for_each_peer(post);
     for_each_peer(wait_partial);
     raise(released[entry(_pid, sequence)], sequence)
  :: else -> break
  od;
  goto leave;
fail:
  assert(found != NOBODY && killed[found]);
#ifndef FAULT_NOT_REPORTED
  raise(lost[_pid], 1 + found);
#endif
  raise(released[entry(_pid, sequence)], sequence);  // the lease goes
leave:
  gone[_pid] = true;
end:
  skip
}
