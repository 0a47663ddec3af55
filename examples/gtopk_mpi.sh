#!/bin/sh
# The counterpart of gTop-k's script of the same name, with its variables and defaults:
#
#     dnn=resnet20 nworkers=4 ./gtopk_mpi.sh
#
# Further ones: dataset, max_epochs, batch_size, lr, density, compressor (none: dense gradients), data_dir, hosts (such as
# node0,node1). What follows on the command line are flags of `python -m cifar`.
set -eu

dnn="${dnn:-resnet20}"
case "$dnn" in
    resnet50) dataset="${dataset:-imagenet}" max_epochs="${max_epochs:-95}" batch_size="${batch_size:-64}" lr="${lr:-0.01}" ;;
    alexnet) dataset="${dataset:-imagenet}" max_epochs="${max_epochs:-95}" batch_size="${batch_size:-256}" lr="${lr:-0.01}" ;;
    *) dataset="${dataset:-cifar10}" max_epochs="${max_epochs:-141}" batch_size="${batch_size:-32}" lr="${lr:-0.1}" ;;
esac
nworkers="${nworkers:-4}"
compressor="${compressor:-gtopk}"
if [ "$compressor" != none ]; then
    set -- --density "${density:-0.001}" "$@"
fi
exec mpiexec -n "$nworkers" ${hosts:+-host "$hosts"} python -m cifar --dnn "$dnn" --dataset "$dataset" \
    --max-epochs "$max_epochs" --batch-size "$batch_size" --nworkers "$nworkers" --data-dir "${data_dir:-./data}" \
    --lr "$lr" --compression --compressor "$compressor" "$@"
