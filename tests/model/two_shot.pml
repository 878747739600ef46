// A two-shot all-reduce, the input of which is made in its slot: prepared (leased, not started) while another one runs,
// reduced in place a part a rank, the parts read by all, and perhaps kept as the caller's result.
#ifndef ENTRIES
#define ENTRIES 2
#endif
#ifdef KEEPS
#define SLOTS 3  // two in flight, and a result
#else
#define SLOTS 2
#endif
#include "ranks.pml"

#ifndef OPERATIONS
#define OPERATIONS 4
#endif

#define shown(sequence) (2 * (sequence))       // flag `published`: the header is there
#define filled(sequence) (2 * (sequence) + 1)  // and the input

// Of an element: in work, the caller's, an operation's input, and its sum.
#define BUSY 254
#define CALLER 255
#define input(sequence) (2 * (sequence))
#define sum(sequence) (2 * (sequence) + 1)

byte published[RANKS * ENTRIES], result[RANKS * ENTRIES], released[RANKS * ENTRIES];
byte slot_of[RANKS * ENTRIES];
byte element[RANKS * SLOTS * RANKS];  // by owner, slot and the rank that reduces it

#define in_slot(owner, slot, reducer) element[at(at(owner, slot, SLOTS), reducer, RANKS)]
#define of(owner, reducer) in_slot(owner, slot_of[entry(owner, now)], reducer)

#define released_entry(p) (released[entry(p, sequence)] + ENTRIES >= sequence)
#define released_slot(p) (released[entry(p, last[slot])] >= last[slot])
#define released_this(p) (released[entry(p, now)] >= now)
#define is_filled(p) (published[entry(p, now)] >= filled(now))
#define is_input(p) (of(p, _pid) == input(now))

#ifdef KEEPS
#define is_kept(s) kept[s]
#else
#define is_kept(s) false
#endif
#ifdef FAULT_PREPARED_SLOT_TAKEN
#define is_busy(i, s) (in_flight[i] != 0 && is_started[i] && slots[i] == s)
#else
#define is_busy(i, s) (in_flight[i] != 0 && slots[i] == s)
#endif
#define busy(s) (is_busy(0, s) || is_busy(1, s))
#define usable(s) (!busy(s) && !is_kept(s))

#define set_part(p) in_slot(_pid, slot, p) = value
#if RANKS == 2
#define set_all(to) value = to; set_part(0); set_part(1); value = 0
#else
#define set_all(to) value = to; set_part(0); set_part(1); set_part(2); value = 0
#endif

#ifdef FAULT_SUM_NOT_WAITED_FOR
#define begin_sum(p) assert(of(p, p) == sum(now))
#else
#define begin_sum(p) atomic { result[entry(p, now)] >= now; assert(of(p, p) == sum(now)) }
#endif
#define end_sum(p) assert(of(p, p) == sum(now))

#define can_start(i) (in_flight[i] != 0 && !is_started[i])
#define start(i) atomic { published[entry(_pid, in_flight[i])] = filled(in_flight[i]); is_started[i] = true }

inline prepare() {
  atomic { sequence++; all(released_entry) };
  atomic {
    if
    :: usable(0) -> slot = 0
    :: !usable(0) && usable(1) -> slot = 1
#if SLOTS > 2
    :: !usable(0) && !usable(1) && usable(2) -> slot = 2
#endif
    fi
  };
#ifndef FAULT_SLOT_NOT_WAITED_FOR
  all(released_slot);
#endif
  atomic {
    last[slot] = sequence;
    slot_of[entry(_pid, sequence)] = slot;
    i = (in_flight[0] == 0 -> 0 : 1);
    in_flight[i] = sequence;
    slots[i] = slot;
    i = 0;
#ifdef FAULT_FILLED_WHEN_PREPARED
    published[entry(_pid, sequence)] = filled(sequence);
#else
    published[entry(_pid, sequence)] = shown(sequence);
#endif
    set_all(BUSY)
  };
  atomic { set_all(input(sequence)); slot = 0 }
}

inline finish() {
#ifndef FAULT_INPUTS_NOT_WAITED_FOR
  all(is_filled);
#endif
  atomic {
    assert(all(is_input));
    slot = slots[0];
#ifdef FAULT_WHOLE_REDUCED_IN_PLACE
    set_all(BUSY)
  };
  d_step { set_all(sum(now)) };
#else
    of(_pid, _pid) = BUSY
  };
  atomic {
    of(_pid, _pid) = input(now);
    assert(all(is_input));
    of(_pid, _pid) = sum(now)
  };
#endif
  result[entry(_pid, now)] = now;
#ifdef FAULT_RELEASED_BEFORE_SUMS_ARE_READ
  released[entry(_pid, now)] = now;
#endif
  for_each_peer(begin_sum);
  atomic { for_each_peer(end_sum) };
  released[entry(_pid, now)] = now
}

active [RANKS] proctype rank() {
  byte sequence, slot, now, value, i;
  byte last[SLOTS];    // the operation that a slot serves, or served last
  byte in_flight[2];   // operations, the oldest first; 0: none
  byte slots[2];       // theirs
  bool is_started[2];  // else prepared
#ifdef KEEPS
  bool kept[SLOTS];
#endif
  do
  :: sequence < OPERATIONS && in_flight[1] == 0 -> prepare()
  :: can_start(0) -> start(0)
  :: can_start(1) -> start(1)
  :: is_started[0] ->
     now = in_flight[0];
     finish();
#ifdef KEEPS
     if
     :: !kept[0] && !kept[1] && !kept[2] ->  // NOTE [kept result]
#ifndef FAULT_RESULT_GIVEN_BEFORE_RELEASE
        all(released_this);
#endif
        atomic { kept[slot] = true; set_all(CALLER) }
     :: true  // copied
     fi;
#endif
     atomic {
       in_flight[0] = in_flight[1];
       slots[0] = slots[1];
       is_started[0] = is_started[1];
       in_flight[1] = 0;
       slots[1] = 0;
       is_started[1] = false;
       now = 0;
       slot = 0
     }
#ifdef KEEPS
  :: kept[0] -> atomic { assert(in_slot(_pid, 0, _pid) == CALLER); kept[0] = false }  // the caller frees a result
  :: kept[1] -> atomic { assert(in_slot(_pid, 1, _pid) == CALLER); kept[1] = false }
  :: kept[2] -> atomic { assert(in_slot(_pid, 2, _pid) == CALLER); kept[2] = false }
#endif
  :: sequence == OPERATIONS && in_flight[0] == 0 -> break
  od
}
