"""The app's models and data sets by name. Each is imported only when it is used."""

# (channels, classes, size) -> nn.Module; size: pixels a side
MODELS = {
    "resnet20": "thinwire_cifar.models.resnet_cifar:resnet20",
    "resnet32": "thinwire_cifar.models.resnet_cifar:resnet32",
    "resnet56": "thinwire_cifar.models.resnet_cifar:resnet56",
    "resnet110": "thinwire_cifar.models.resnet_cifar:resnet110",
    "resnet18": "thinwire_cifar.models.resnet_imagenet:resnet18",
    "resnet50": "thinwire_cifar.models.resnet_imagenet:resnet50",
    "vgg16": "thinwire_cifar.models.vgg:vgg16",
    "vgg19": "thinwire_cifar.models.vgg:vgg19",
    "alexnet": "thinwire_cifar.models.alexnet:alexnet",
    "mlp": "thinwire_cifar.models.mlp:mlp",
    "cnn": "thinwire_cifar.models.cnn:cnn",
    "vit": "thinwire_cifar.models.vit:vit",
}

# (data_dir, *, download) -> thinwire_cifar.data.images.Images
DATASETS = {
    "digits": "thinwire_cifar.data.digits:load",
    "mnist": "thinwire_cifar.data.mnist:load",
    "fashion-mnist": "thinwire_cifar.data.fashion_mnist:load",
    "cifar10": "thinwire_cifar.data.cifar10:load",
    "cifar100": "thinwire_cifar.data.cifar100:load",
    "imagenet": "thinwire_cifar.data.imagenet:load",
}

# Names of published commands whose app is another one.
TEXT = "python -m thinwire_text (sentiment and language modelling)"
ELSEWHERE = {"lstm": TEXT, "lstmimdb": TEXT, "lstman4": "python -m thinwire_deepspeech (speech recognition)"}
