"""Fits a Keras model on torch: a functional model and a list of layers inside a model."""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy
from checks import check, digest, exact, logged, random_number
from keras import layers


class Classifier(keras.Model):
    def __init__(self, features: keras.Model) -> None:
        super().__init__()
        self.features = features
        self.blocks = [layers.Dense(5, activation="relu") for _ in range(2)]
        self.head = layers.Dense(2)

    def call(self, x):
        x = self.features(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Report(keras.callbacks.Callback):
    """Prints the loss of each step; Keras logs the mean of all steps of the epoch so far."""

    total = 0.0

    def on_epoch_begin(self, epoch, logs=None):
        self.total = 0.0

    def on_train_batch_end(self, batch, logs=None):
        loss = logs["loss"] * (batch + 1) - self.total
        self.total += loss
        logged("loss", int(self.model.optimizer.iterations) - 1, loss)


keras.utils.set_random_seed(0)
image = keras.Input((8, 8, 1))
features = layers.BatchNormalization()(layers.Conv2D(4, 3, activation="relu")(image))
features = layers.Dropout(0.2)(layers.Flatten()(features))
model = Classifier(keras.Model(image, features))
model.compile(optimizer=keras.optimizers.Adam(1e-2), loss="mse")
x = numpy.random.default_rng(0).normal(size=(24, 8, 8, 1)).astype("float32")
y = x.mean(axis=(1, 2)).repeat(2, axis=1)
history = model.fit(
    x, y, batch_size=6, epochs=2, validation_split=0.25, verbose=0, callbacks=[Report()]
)
check("validation", *map(exact, history.history["val_loss"]))
check("predicted", exact(model.predict(x, verbose=0).sum()))
check("final", digest(model), random_number())
