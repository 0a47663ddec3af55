"""The app's models and data sets by name. Each is imported only when it is used."""

MODELS = {"resnet20": "cifar.resnet:resnet20"}  # (channels, classes) -> nn.Module
DATASETS = {"digits": "cifar.digits:load", "cifar10": "cifar.cifar10:load"}  # (data_dir) -> cifar.images.Images
