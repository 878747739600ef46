#!/usr/bin/env bash
# Runs a command on several hosts that this machine stands in for: network namespaces joined by a switch, each with a wire of a given rate.
# Usage: tools/hosts.sh [--rate RATE] [--down HOST:SECONDS] HOSTS COMMAND...
#   --rate RATE        of each host's wire, each way, as tc has it (1gbit, 500mbit); not limited without
#   --down HOST:SECONDS  cuts this host's wire after so many seconds
# The command finds itself in an environment as torchrun's users know it: NNODES, NODE_RANK, MASTER_ADDR (10.77.0.1), MASTER_PORT, and
# HOST_ADDR, its own address. Its output comes with "[HOST] " before each line. At the end the bytes that left each host are shown, one line a host:
#   host 0 sent 12345 bytes
# Exit: that of the first command that failed. Needs root. Nothing stays behind, even after kill -9: the namespaces end with the process that made them.
set -euo pipefail

if [ "${BRAID_HOSTS_INSIDE:-}" = "" ]; then
  [ "$(id -u)" = 0 ] || { echo "hosts: needs root" >&2; exit 77; }
  export BRAID_HOSTS_INSIDE=1
  exec unshare --net --mount --pid --fork --kill-child=KILL --mount-proc "$0" "$@"
fi
unset BRAID_HOSTS_INSIDE

rate= down=
while [[ ${1:-} == --* ]]; do
  case $1 in
    --rate) rate=$2 ;;
    --down) down=$2 ;;
    *) echo "hosts: unknown flag $1" >&2; exit 2 ;;
  esac
  shift 2
done
num=$1
shift

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
  limit "wire$h"
  limit eth0 -n "host$h"
done

export NNODES=$num MASTER_ADDR=10.77.0.1 MASTER_PORT=29500
pids=()
for ((h = 0; h < num; ++h)); do
  NODE_RANK=$h HOST_ADDR=10.77.0.$((h + 1)) ip netns exec "host$h" "$@" > >(sed -u "s/^/[$h] /") 2> >(sed -u "s/^/[$h] /" >&2) &
  pids+=($!)
done
if [ -n "$down" ]; then (sleep "${down#*:}"; ip link set "wire${down%:*}" down) & fi
result=0
for pid in "${pids[@]}"; do
  code=0
  wait "$pid" || code=$?
  [ "$result" != 0 ] || result=$code
done
for ((h = 0; h < num; ++h)); do
  echo "host $h sent $(ip netns exec "host$h" cat /sys/class/net/eth0/statistics/tx_bytes) bytes" >&2
done
exit "$result"
