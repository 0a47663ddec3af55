#!/bin/bash
# The container's entry point without a container: two pods of each kind are two processes here, with the environment that
# the operator gives them. Nothing is left.
#
#     bash examples/kubernetes/try.sh
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$(mktemp -d)
trap 'kill $(jobs -p) 2> /dev/null || true; rm -r "$folder"' EXIT
trap 'exit 130' INT TERM
cd "$folder"
export MASTER_ADDR=localhost MASTER_PORT TMPDIR=$folder # torchrun leaves files there
MASTER_PORT=$(python -c 'import socket; s = socket.create_server(("", 0)); print(s.getsockname()[1])')

pod() { # NAME VARIABLE=VALUE …
    env "${@:2}" bash "$here/entrypoint.sh" cifar --dnn mlp --algorithm gtopk --max-epochs 3 --output "runs/$1"
}

both() { # NAME; of the second pod only the errors are shown
    wait $!
    tail -n 2 "$1.out"
    grep -q '"epoch": 3' "runs/$1/metrics.jsonl" && grep -q '"world_size": 2' "runs/$1/metrics.jsonl"
}

echo 'TrainJob, PyTorchJob: two nodes'
torchrun=(PET_NNODES=2 PET_NPROC_PER_NODE=1 PET_MASTER_ADDR=localhost "PET_MASTER_PORT=$MASTER_PORT")
pod torchrun "${torchrun[@]}" PET_NODE_RANK=1 > /dev/null &
pod torchrun "${torchrun[@]}" PET_NODE_RANK=0 > torchrun.out
both torchrun

echo 'MPIJob: a launcher, two slots'
echo 'localhost:2' > hostfile
pod mpi HYDRA_HOST_FILE=hostfile > mpi.out &
both mpi

echo 'StatefulSet: two pods'
pod statefulset REPLICAS=2 SERVICE=ranks HOSTNAME=ranks-1 > /dev/null &
pod statefulset REPLICAS=2 SERVICE=ranks HOSTNAME=ranks-0 > statefulset.out
both statefulset
echo 'done'
