"""The app's models and data sets by name. Each is imported only when it is used."""

# (channels, classes, size) -> nn.Module; size: pixels a side
MODELS = {
    "resnet20": "cifar.models.resnet_cifar:resnet20",
    "resnet32": "cifar.models.resnet_cifar:resnet32",
    "resnet56": "cifar.models.resnet_cifar:resnet56",
    "resnet110": "cifar.models.resnet_cifar:resnet110",
    "resnet18": "cifar.models.resnet_imagenet:resnet18",
    "resnet50": "cifar.models.resnet_imagenet:resnet50",
    "vgg16": "cifar.models.vgg:vgg16",
    "vgg19": "cifar.models.vgg:vgg19",
    "alexnet": "cifar.models.alexnet:alexnet",
    "mlp": "cifar.models.mlp:mlp",
    "cnn": "cifar.models.cnn:cnn",
    "vit": "cifar.models.vit:vit",
}

# (data_dir, *, download) -> cifar.data.images.Images
DATASETS = {
    "digits": "cifar.data.digits:load",
    "mnist": "cifar.data.mnist:load",
    "cifar10": "cifar.data.cifar10:load",
    "cifar100": "cifar.data.cifar100:load",
    "imagenet": "cifar.data.imagenet:load",
}

# Names of published commands whose app is another one.
TEXT = "python -m text (sentiment and language modelling)"
ELSEWHERE = {"lstm": TEXT, "lstmimdb": TEXT, "lstman4": "python -m deepspeech (speech recognition)"}
