// Entries by sequence number and slots that their owner chooses: nothing is written while a peer may still read it.
#ifndef ENTRIES
#define ENTRIES 3
#endif
#include "ranks.pml"

#ifndef OPERATIONS
#define OPERATIONS 5
#endif
// Two operations in flight, waited for in any order, another one on each rank. Then RANKS * (in flight - 1) slots can
// be busy at an owner that starts one more; with fewer slots all ranks must wait in the same order: the oldest first.
#ifdef OLDEST_FIRST
#define SLOTS 2
#define may_finish(i) (in_flight[i] != 0 && (in_flight[1 - i] == 0 || in_flight[i] < in_flight[1 - i]))
#else
#ifndef SLOTS
#define SLOTS (RANKS + 1)
#endif
#define may_finish(i) (in_flight[i] != 0)
#endif

#define shown(sequence) (2 * (sequence))       // flag `published`: the header is there
#define filled(sequence) (2 * (sequence) + 1)  // and the payload

byte published[RANKS * ENTRIES], released[RANKS * ENTRIES];
byte header[RANKS * ENTRIES];   // the operation that it describes
byte slot_of[RANKS * ENTRIES];  // the slot that it names
byte payload[RANKS * SLOTS];    // the operation that it belongs to

#define released_entry(p) (released[entry(p, sequence)] + ENTRIES >= sequence)
#define released_slot(p) (released[entry(p, last[slot])] >= last[slot])
#define busy(s) ((in_flight[0] != 0 && slots[0] == s) || (in_flight[1] != 0 && slots[1] == s))
#define not_waited_for(i) (in_flight[i] != 0 && in_flight[i] + ENTRIES == sequence + 1)  // an error of the caller

// A slot that all have released, or else the one that served the oldest operation; then it is waited for.
inline take_slot() {
  d_step {
    best = SLOTS;
    do
    :: slot < SLOTS && busy(slot) -> slot++
    :: slot < SLOTS && !busy(slot) ->
       if
       :: all(released_slot) -> best = slot; break
       :: else ->
          if
          :: best == SLOTS -> best = slot
          :: best < SLOTS -> if :: last[slot] < last[best] -> best = slot :: else fi
          fi
       fi;
       slot++
    :: slot == SLOTS -> break
    od;
    slot = best;
    best = 0
  }
}

// Reading takes from here ...
#define begin_header(p) atomic { published[entry(p, now)] >= shown(now); assert(header[entry(p, now)] == now) }
#define begin_payload(p)                        \
  atomic {                                      \
    published[entry(p, now)] >= filled(now);    \
    assert(payload[at(p, slot_of[entry(p, now)], SLOTS)] == now) \
  }
// ... to here.
#define end(p)                                                     \
  assert(header[entry(p, now)] == now);                            \
  assert(payload[at(p, slot_of[entry(p, now)], SLOTS)] == now)

active [RANKS] proctype rank() {
  byte sequence, slot, best, now, i;
  byte last[SLOTS];   // the operation that a slot serves, or served last
  byte in_flight[2];  // operations; 0: none
  byte slots[2];      // theirs
  do
  :: atomic { sequence < OPERATIONS && (in_flight[0] == 0 || in_flight[1] == 0) &&
     !not_waited_for(0) && !not_waited_for(1) ->
     sequence++ };
#ifndef FAULT_ENTRY_NOT_WAITED_FOR
     all(released_entry);
#endif
     take_slot();
#ifndef FAULT_SLOT_NOT_WAITED_FOR
     all(released_slot);
#endif
     atomic {
       last[slot] = sequence;
       i = (in_flight[0] == 0 -> 0 : 1);
       in_flight[i] = sequence;
       slots[i] = slot;
       i = 0;
#ifdef FAULT_SHOWN_BEFORE_HEADER
       published[entry(_pid, sequence)] = shown(sequence)
     }
#endif
       header[entry(_pid, sequence)] = sequence;
       slot_of[entry(_pid, sequence)] = slot
#ifndef FAULT_SHOWN_BEFORE_HEADER
     }
     published[entry(_pid, sequence)] = shown(sequence);
#endif
     payload[at(_pid, slot, SLOTS)] = sequence;
     atomic { published[entry(_pid, sequence)] = filled(sequence); slot = 0 }
  :: atomic { sequence > 0 && (may_finish(0) || may_finish(1)) ->
     if
     :: may_finish(0) -> i = 0
     :: may_finish(1) -> i = 1
     fi;
     now = in_flight[i] };
#ifdef FAULT_RELEASED_BEFORE_READ
     released[entry(_pid, now)] = now;
#endif
     for_each_peer(begin_header);
     for_each_peer(begin_payload);
     atomic { for_each_peer(end) };
     atomic { in_flight[i] = 0; slots[i] = 0; i = 0; released[entry(_pid, now)] = now; now = 0 }
  :: sequence == OPERATIONS && in_flight[0] == 0 && in_flight[1] == 0 -> break
  od
}
