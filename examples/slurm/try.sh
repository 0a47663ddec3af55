#!/bin/bash
# A Slurm cluster of three nodes on this machine, on which the jobs of this folder run with little work:
#
#     apt-get install slurmctld slurmd slurm-client munge iproute2
#     sudo env PATH="$PATH" bash examples/slurm/try.sh [srun] [pmi2] [torchrun] [requeue] [elastic]
#
# A node is a network namespace with a name and an address. Processes, mounts and files live in namespaces that end with
# this script; nothing of them is left. Needs Linux and root.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
PATH=$PATH:/usr/sbin:/sbin
if [ "${1:-}" != inside ]; then
    for program in munged slurmctld slurmd ip python; do
        type -P $program > /dev/null || { echo "error: $program is not installed: see the top of $0" >&2; exit 1; }
    done
    [ "$(id -u)" = 0 ] || { echo "error: expected root, started as $(id -un): use sudo, as at the top of $0" >&2; exit 1; }
    exec unshare --mount --net --uts --pid --fork --kill-child --mount-proc bash "$here/try.sh" inside "$@"
fi
shift
trap 'exit 130' INT TERM
export SLURM_CONF=$here/slurm.conf
export TORCH_CPP_LOG_LEVEL=ERROR # torch misses a name server

cluster() {
    mount -t tmpfs run /run
    mkdir -p /run/munge /run/netns /run/slurm/{controller,node1,node2,node3} /run/job
    printf '%s\n' '127.0.0.1 localhost' '10.0.0.100 head' '10.0.0.1 node1' '10.0.0.2 node2' '10.0.0.3 node3' > /run/hosts
    mount --bind /run/hosts /etc/hosts
    mount -t tmpfs cgroup /sys/fs/cgroup # slurmd wants to see one, and none is used
    mkdir /sys/fs/cgroup/systemd
    mount -t cgroup -o none,name=try cgroup /sys/fs/cgroup/systemd
    hostname head
    ip link set lo up
    ip link add bridge type bridge
    ip address add 10.0.0.100/24 dev bridge
    ip link set bridge up
    head -c 128 /dev/urandom > /run/munge/key && chmod 600 /run/munge/key
    munged --key-file /run/munge/key --seed-file /run/munge/seed --log-file /run/munge/log --pid-file /run/munge/pid
    slurmctld -D &> /run/slurm/controller.log &
    for number in 1 2 3; do node $number; done
    until [ "$(sinfo --noheader --states idle --format %D)" = 3 ]; do pause; done
    sinfo --Node
}

node() {
    ip netns add "node$1"
    ip link add "to$1" type veth peer name eth0 netns "node$1"
    ip link set "to$1" master bridge up
    ip -n "node$1" link set lo up
    ip -n "node$1" address add "10.0.0.$1/24" dev eth0
    ip -n "node$1" link set eth0 up
    nsenter --net="/run/netns/node$1" unshare --uts bash -c "hostname node$1; exec slurmd -D" &> "/run/slurm/node$1.log" &
    disown # bash has no word to say where it is killed
}

pause() {
    sleep 0.5
    if [ $SECONDS -lt 1200 ]; then return; fi
    tail -n 5 /run/slurm/*.log /run/job/*.out
    echo "error: still not done after $SECONDS s: the logs above may say why"
    exit 1
}

submit() { # what sbatch takes
    echo "\$ sbatch $*"
    job=$(sbatch --parsable "$@")
}

until_it_says() { # TEXT FILE
    until grep -qs "$1" "$2"; do pause; done
}

shows() { # FILE TEXT: waits for the end of the job, which has to be good, and to say this
    until [[ $(scontrol show job "$job") =~ JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL) ]]; do pause; done
    grep -v 'epoch ' "$1" || true
    grep 'epoch ' "$1" | tail -n 1
    echo "${BASH_REMATCH[0]}"
    [ "${BASH_REMATCH[1]}" = COMPLETED ] && grep -q "$2" "$1" || { echo "error: expected COMPLETED, and '$2' in $1"; exit 1; }
}

try_srun() {
    submit srun.sbatch --dnn mlp --max-epochs 10
    shows srun.out 'epoch  10/10'
}

try_pmi2() {
    submit --export=ALL,SLURM_MPI_TYPE=pmi2 srun.sbatch --dnn mlp --max-epochs 10 --overwrite
    shows srun.out 'epoch  10/10'
}

try_torchrun() {
    submit torchrun.sbatch --dnn mlp --max-epochs 10
    shows torchrun.out 'epoch  10/10'
}

try_requeue() { # signalled after 30 s to 60 s: Slurm looks twice a minute
    submit --time=2 --signal=TERM@60 requeue.sbatch --max-epochs 100
    until_it_says 'stopped by SIGTERM' requeue.out
    until [[ $(scontrol show job "$job") == *Reason=BeginTime* ]]; do pause; done
    echo "Slurm lets it wait for two minutes. \$ scontrol update jobid=$job starttime=now timelimit=10"
    scontrol update "jobid=$job" starttime=now timelimit=10
    shows requeue.out 'resumed runs/requeue at step'
}

try_elastic() {
    submit elastic.sbatch --dnn mlp --max-epochs 100
    until_it_says 'epoch  10/' elastic.out
    echo 'kill -9 of all processes of node2'
    ip netns pids node2 | xargs kill -KILL
    scontrol update nodename=node2 state=down reason=lost # Slurm would find out by itself, after SlurmdTimeout
    shows elastic.out '2 ranks go on without rank'
}

cluster
cp "$here"/*.sbatch /run/job
cd /run/job
[ $# -gt 0 ] || set -- srun pmi2 torchrun requeue elastic
for name; do
    echo
    "try_$name"
done
echo
echo "done: $*"
