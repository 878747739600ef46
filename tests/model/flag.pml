// Flag: who sleeps is woken by the raise that it waits for, without the slices of sleep that the code adds.
#ifndef WAITERS
#define WAITERS 2
#endif
#ifndef RAISES
#define RAISES 4
#endif
// The futex compares the low half of the value. The seeded fault lets it wrap within these raises.
#ifdef FAULT_LOW_HALF_WRAPS
#define low(value) ((value) % 2)
#else
#define low(value) (value)
#endif

byte value, waiters;
bool asleep[WAITERS];

inline wake_all() {
  atomic {
    do
    :: woken < WAITERS -> asleep[woken] = false; woken++
    :: else -> break
    od;
    woken = 0
  }
}

active proctype owner() {
  byte seen, woken;
  do
  :: value < RAISES ->
#ifdef FAULT_WAITERS_SEEN_BEFORE_STORE
     seen = waiters;
     value++;
#else
     value++;
     seen = waiters;
#endif
     if
     :: seen != 0 -> wake_all()
     :: else
     fi;
     seen = 0
  :: else -> break
  od
}

active [WAITERS] proctype waiter() {
  byte me = _pid - 1, at_least, seen;
  bool doomed;  // it may be killed in its sleep
  if
  :: doomed = true
  :: skip
  fi;
  do
  :: at_least < RAISES ->
     select (at_least : at_least + 1 .. RAISES);
  again:
     if
     :: value >= at_least
     :: else ->
#ifndef FAULT_NOT_COUNTED
        waiters++;
#endif
        seen = value;
        if
        :: seen < at_least ->
#ifdef FAULT_SLEEP_WITHOUT_COMPARE
           asleep[me] = true;
#else
           atomic { asleep[me] = low(value) == low(seen) }  // in the kernel
#endif
           if
           :: !asleep[me]
           :: doomed -> goto gone  // and stays counted
           fi
        :: else
        fi;
#ifndef FAULT_NOT_COUNTED
        waiters--;
#endif
        seen = 0;
        goto again
     fi
  :: else -> break
  od;
gone:
  skip
}
