// A matmul_all_reduce: partials into the owners' slots, their sums to all, and a result that stays in its slot.
#ifndef ENTRIES
#define ENTRIES 2
#endif
#define SLOTS 2  // one more than operations in flight: a result may be kept
#include "ranks.pml"

#ifndef OPERATIONS
#define OPERATIONS 4
#endif
#define CALLER 255  // what the caller of an operation wrote into its result

byte published[RANKS * ENTRIES], result[RANKS * ENTRIES], released[RANKS * ENTRIES];
byte posted[RANKS * RANKS * ENTRIES];
byte slot_of[RANKS * ENTRIES];
byte partial[RANKS * SLOTS * RANKS];  // by owner, slot and writer: its operation
byte sum[RANKS * SLOTS];              // the owner's rows: in the first partial's place, but that is the owner's matter

#define posted_by(writer, owner, sequence) posted[at(entry(writer, sequence), owner, RANKS)]
#define place(owner, writer) partial[at(at(owner, slot_of[entry(owner, sequence)], SLOTS), writer, RANKS)]
#define sum_of(owner) sum[at(owner, slot_of[entry(owner, sequence)], SLOTS)]

#define released_entry(p) (released[entry(p, sequence)] + ENTRIES >= sequence)
#define released_slot(p) (released[entry(p, last[slot])] >= last[slot])
#define released_this(p) (released[entry(p, sequence)] >= sequence)
#define started(p) (published[entry(p, sequence)] >= sequence)

// A partial is written from here to its post: into a slot that serves this operation, and nothing else.
#define write(p)                                          \
  place(p, _pid) = sequence;                              \
  atomic {                                                \
    assert(place(p, _pid) == sequence);                   \
    posted_by(_pid, p, sequence) = sequence               \
  }
#ifdef RING
#define complete added(RANKS)
#else
#define complete sequence
#endif
#define wait_partial(p) posted_by(p, _pid, sequence) >= sequence
#define begin_partial(p) assert(place(_pid, p) == sequence)
#define wait_sum(p) atomic { result[entry(p, sequence)] >= sequence; assert(sum_of(p) == complete) }
#define end_sum(p) assert(sum_of(p) == complete)

active [RANKS] proctype rank() {
  byte sequence, slot;
  byte last[SLOTS];
  bool kept[SLOTS];
  do
  :: sequence < OPERATIONS ->
     atomic { sequence++; all(released_entry) };
     atomic {
       if
       :: !kept[0] -> slot = 0
       :: !kept[1] -> slot = 1
       fi
     };
     all(released_slot);
     atomic { last[slot] = sequence; slot_of[entry(_pid, sequence)] = slot };
     published[entry(_pid, sequence)] = sequence;
#ifndef FAULT_POST_BEFORE_AGREE
     all(started);
#endif
#ifdef RING
     add_all;
#else
     for_each_peer(write);
#ifndef FAULT_PARTIALS_NOT_WAITED_FOR
     for_each_peer(wait_partial);
#endif
     atomic { for_each_peer(begin_partial); sum_of(_pid) = complete };
#endif
     result[entry(_pid, sequence)] = sequence;
     // finish()
     for_each_peer(wait_sum);
     atomic { for_each_peer(end_sum) };
     released[entry(_pid, sequence)] = sequence;
     if
     :: !kept[1 - slot] ->  // NOTE [kept result]
#ifndef FAULT_RESULT_GIVEN_BEFORE_RELEASE
        all(released_this);
#endif
        atomic { kept[slot] = true; sum_of(_pid) = CALLER }
     :: true  // copied
     fi;
     slot = 0
  :: kept[0] -> atomic { assert(sum[at(_pid, 0, SLOTS)] == CALLER); kept[0] = false }  // the caller frees a result
  :: kept[1] -> atomic { assert(sum[at(_pid, 1, SLOTS)] == CALLER); kept[1] = false }
  :: sequence == OPERATIONS -> break
  od
}
