// Headers that differ: the same error on every rank before any further operation, and then the same next operation.
#ifndef ENTRIES
#define ENTRIES 4
#endif
#include "ranks.pml"

#ifndef OPERATIONS
#define OPERATIONS 3  // at most, before the last one of a rank; each rank has its own number of them
#endif
// Headers: of those, of a deviating rank's, of the last one, and of the one after an error.
#define USUAL 1
#define OTHER 2
#define LAST 3
#define AFTER_ERROR 4

// Flag `result`.
#define done(sequence) (2 * (sequence))
#define told(sequence) (2 * (sequence) + 1)

byte published[RANKS * ENTRIES], result[RANKS * ENTRIES], released[RANKS * ENTRIES];
byte header[RANKS * ENTRIES], started[RANKS * ENTRIES];
byte disagreed[RANKS];
byte error;      // the operation that the error names: the same on every rank
bool completed;  // a rank without error

#define released_next(p) (released[entry(p, sequence + 1)] + ENTRIES >= sequence + 1)
#define shown(p) (published[entry(p, now)] >= now)
#define is_shown_in(p) (published[entry(p, telling)] == telling)
#define is_done(p) (result[entry(p, now)] >= done(now))
#define differs_in(p, sequence) (header[entry(p, sequence)] != header[entry(0, sequence)])
#define differs(p) differs_in(p, now)
#define differs_told(p) differs_in(p, telling)
#define agreed_after_error(p) (published[entry(p, now)] == now && header[entry(p, now)] == AFTER_ERROR)

// Who has not told of one yet joins any; who has told, an earlier one: so that all meet in the earliest.
#ifdef FAULT_FIRST_SEEN_COUNTS
#define untold(p) (disagreed[p] > over && disagreed[_pid] <= over)
#else
#define untold(p) (disagreed[p] > over && (disagreed[_pid] <= over || disagreed[p] < disagreed[_pid]))
#endif
#define if_joins(p) :: untold(p) -> telling = disagreed[p]; goto tell
#if RANKS == 2
#define wait(condition) if :: condition if_joins(0) if_joins(1) fi
#else
#define wait(condition) if :: condition if_joins(0) if_joins(1) if_joins(2) fi
#endif

inline start(what) {
  wait(all(released_next));
  atomic {
    sequence++;
    header[entry(_pid, sequence)] = what;
    if
    :: first == 0 -> first = sequence
    :: else -> second = sequence
    fi
  };
  published[entry(_pid, sequence)] = sequence
}

// In operation `now`. Those that an error has ended meet it at once.
inline finish() {
  if
  :: now <= over -> goto ended
  :: else
  fi;
  wait(all(shown));
  if
  :: any(differs) -> telling = now; goto tell
  :: else
  fi;
#ifdef RESULTS
  result[entry(_pid, now)] = done(now);
  wait(all(is_done))
#endif
}

inline release() {
  atomic {
    released[entry(_pid, now)] = now;
    if
    :: now == first -> first = second
    :: else
    fi;
    second = 0;
    now = 0
  }
}

#define add_started(p) wait(result[entry(p, telling)] >= told(telling)); last = max(last, started[entry(p, telling)])
#define max(a, b) ((a) > (b) -> (a) : (b))

active [RANKS] proctype rank() {
  byte sequence, begun, number, over, telling, last;
  byte first, second, now;  // in flight, and in work
  bool in_last;
  select (number : 0 .. OPERATIONS);
next:
  do
  :: begun < number && second == 0 && !(first != 0 && first + ENTRIES == sequence + 1) ->
     begun++;
     if
     :: start(USUAL)
#if RANKS == 2
     :: _pid == 1 -> start(OTHER)
#else
     :: _pid == 2 -> start(OTHER)
#endif
     fi
  :: first != 0 -> now = first; finish(); release()
#ifndef RESULTS  // then ranks that wait in different orders wait for each other
  :: second != 0 -> now = second; finish(); release()
#endif
#ifdef DROPS
  :: first != 0 -> now = first; release()  // given up without a look at its headers
#endif
  :: begun == number && first == 0 -> break
  od;
  in_last = true;
  start(LAST);
  now = first;
  finish();
  release();
  assert(error == 0);
  completed = true;
  goto end;

tell:
  assert(all(is_shown_in) && any(differs_told) && !completed);
#ifdef FAULT_TOLD_BEFORE_STARTED
  result[entry(_pid, telling)] = told(telling);
  started[entry(_pid, telling)] = sequence;
#else
  started[entry(_pid, telling)] = sequence;
  result[entry(_pid, telling)] = told(telling);
#endif
  disagreed[_pid] = telling;
  last = sequence;
  for_each_peer(add_started);
  assert(error == 0 || error == telling);
  atomic { error = telling; over = last };
  do
  :: sequence < last -> sequence++;
#ifndef FAULT_FILLED_UP_WITHOUT_RELEASE
     released[entry(_pid, sequence)] = sequence
#endif
  :: else -> break
  od;
#ifdef FAULT_NOT_FILLED_UP
  sequence = started[entry(_pid, telling)];
#endif
#ifdef FAULT_JOINING_RANK_GOES_ON
  if
  :: now != telling && !in_last -> goto next
  :: else
  fi;
#endif

ended:
  // The caller unwinds: what is in flight meets the error again, and is released.
  atomic { now = 0; telling = 0; last = 0 };
  do
  :: first != 0 -> now = first;
#ifdef FAULT_ENDED_OPERATION_WAITS
     wait(all(shown));
#endif
     release()
  :: else -> break
  od;
  begun = 0;
  do
  :: begun < ENTRIES ->  // until all entries are used again
     begun++;
     start(AFTER_ERROR);
     now = first;
     wait(all(shown));
     assert(all(agreed_after_error));
     release()
  :: else -> break
  od;
end:
  skip
}
