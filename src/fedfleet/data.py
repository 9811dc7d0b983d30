"""Data of your own: what arrays, tables and folders come as, made into what ``fedfleet.run(data=…)`` takes.

from fedfleet.data import from_dataframe

data = from_dataframe(table, client="hospital", label="outcome")
fedfleet.run({"task": {"model": "logistic"}}, data=data, out="runs/hospitals")
"""

from fedfleet.datasets.arrays import from_arrays, from_dataframe
from fedfleet.datasets.files import DataError
from fedfleet.datasets.hugging_face import from_hf
from fedfleet.datasets.image_folder import from_image_folder
from fedfleet.datasets.texts import from_texts

__all__ = ["DataError", "from_arrays", "from_dataframe", "from_hf", "from_image_folder", "from_texts"]
