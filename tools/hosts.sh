#!/usr/bin/env bash
# Runs a command on several hosts that this machine stands in for: network namespaces joined by a switch, each with a wire of a given rate.
# Usage: tools/hosts.sh [--rate RATE] [--down HOST:SECONDS] HOSTS COMMAND...
#   --rate RATE          of each host's wire, each way, as tc has it (1gbit, 500mbit); not limited without
#   --down HOST:SECONDS  cuts this host's wire after so many seconds
# The command finds itself in an environment as torchrun's users know it: NNODES, NODE_RANK, MASTER_ADDR (10.77.0.1), MASTER_PORT, and
# HOST_ADDR, its own address. Its output comes with "[HOST] " before each line. At the end the bytes that left each host are shown, one line a host:
#   host 0 sent 12345 bytes
# Exit: that of the first host whose command failed; 2: wrong usage; 77: not as root, or without the tools (ip, tc, unshare). Nothing stays
# behind, even after kill -9: the namespaces end with the process that made them, and what the command has left running ends with it.
set -euo pipefail

usage() { sed -n '/^# Usage/,/^set/{/^set/d;s/^# \?//;p}' "$0"; }
wrong() { echo "hosts: $*. HINT: tools/hosts.sh --help" >&2; exit 2; }
skip() { echo "hosts: $*" >&2; exit 77; }
is() { [[ $1 =~ ^$2$ ]]; }

flags=("$@")
rate='' down=''
while [[ ${1:-} == --* ]]; do
  case $1 in
    --help) usage; exit ;;
    --rate | --down) [ $# -ge 2 ] || wrong "$1 is without its value" ;;
    *) wrong "unknown flag $1" ;;
  esac
  case $1 in
    --rate) rate=$2; is "$rate" '[0-9]+(\.[0-9]+)?([kmgt]i?)?(bit|bps)' || wrong "--rate is '$rate', expected one like 500mbit" ;;
    --down) down=$2; is "$down" '[0-9]+:[0-9]+(\.[0-9]+)?' || wrong "--down is '$down', expected HOST:SECONDS" ;;
  esac
  shift 2
done
num=${1:-}
is "$num" '[1-9][0-9]?' || wrong "the number of hosts is '$num', expected 1 to 99"
[ -z "$down" ] || [ "${down%:*}" -lt "$num" ] || wrong "--down is '$down', expected a host below $num"
[ $# -ge 2 ] || wrong "no command given"
shift

if [ -z "${BRAID_HOSTS_INSIDE:-}" ]; then
  [ "$(id -u)" = 0 ] || skip "needs root"
  for tool in ip tc unshare; do command -v $tool >/dev/null || skip "needs $tool (packages iproute2, util-linux)"; done
  why=$(unshare --net --mount --pid --fork true 2>&1) || skip "may not make namespaces: $why"
  export BRAID_HOSTS_INSIDE=1
  exec unshare --net --mount --pid --fork --kill-child=KILL --mount-proc "$0" "${flags[@]}"
fi
unset BRAID_HOSTS_INSIDE

mount -t tmpfs none /run  # names of namespaces are files in /run/netns: of nobody else
ip link set lo up
ip link add switch mtu 65000 type bridge
ip link set switch up
# MTU 65000 stands in for a card's segmentation offload.
limit() { [ -z "$rate" ] || tc "${@:2}" qdisc add dev "$1" root tbf rate "$rate" burst 512kb latency 50ms; }
for ((h = 0; h < num; ++h)); do
  ip netns add "host$h"
  ip link add "wire$h" mtu 65000 type veth peer name eth0 mtu 65000 netns "host$h"
  ip link set "wire$h" master switch up
  ip -n "host$h" link set lo up
  ip -n "host$h" link set eth0 up
  ip -n "host$h" address add "10.77.0.$((h + 1))/24" dev eth0
  # In a switch's queue there is nothing to probe for: BBR, where it is the machine's choice, paces and pauses.
  echo reno | ip netns exec "host$h" tee /proc/sys/net/ipv4/tcp_congestion_control >/dev/null
  limit "wire$h"
  limit eth0 -n "host$h"
done

export NNODES=$num MASTER_ADDR=10.77.0.1 MASTER_PORT=29500
commands=() printers=()
for ((h = 0; h < num; ++h)); do
  exec {out}> >(exec sed -u "s/^/[$h] /")
  printers+=($!)
  exec {err}> >(exec sed -u "s/^/[$h] /" >&2)
  printers+=($!)
  NODE_RANK=$h HOST_ADDR=10.77.0.$((h + 1)) ip netns exec "host$h" "$@" >&"$out" 2>&"$err" {out}>&- {err}>&- &
  commands+=($!)
  exec {out}>&- {err}>&-
done
if [ -n "$down" ]; then (sleep "${down#*:}"; ip link set "wire${down%:*}" down) & fi
result=0
for ((h = 0; h < num; ++h)); do
  code=0
  { wait "${commands[h]}" || code=$?; } 2>/dev/null
  [ "$result" != 0 ] || result=$code
done
for ((h = 0; h < num; ++h)); do ip netns pids "host$h" | xargs -r kill -9 2>/dev/null || true; done
wait "${printers[@]}"
for ((h = 0; h < num; ++h)); do
  echo "host $h sent $(ip netns exec "host$h" cat /sys/class/net/eth0/statistics/tx_bytes) bytes" >&2
done
exit "$result"
