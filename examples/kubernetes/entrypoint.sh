#!/bin/bash
# Which rank this pod is stands in its environment; it becomes that rank of `python -m …`: entrypoint.sh cifar FLAG …
set -euo pipefail
if [ -n "${PET_NNODES:-}" ]; then # TrainJob, PyTorchJob: torchrun reads PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, …
    exec torchrun -m "$@"
elif [ -n "${HYDRA_HOST_FILE:-}" ]; then # the launcher of an MPIJob, for MPICH: lines of HOST:SLOTS
    exec mpiexec -n "$(awk -F : '{ ranks += $2 ? $2 : 1 } END { print ranks }' "$HYDRA_HOST_FILE")" python -m "$@"
elif [ -n "${REPLICAS:-}" ]; then # a StatefulSet: its pods are NAME-0, NAME-1, …
    export RANK=${HOSTNAME##*-} WORLD_SIZE=$REPLICAS MASTER_PORT=${MASTER_PORT:-29500}
    export MASTER_ADDR=${MASTER_ADDR:-${HOSTNAME%-*}-0.$SERVICE}
    exec python -m "$@"
fi
exec python -m "$@" # alone
