"Packaging: everything that can change stands in settings.ini, which nbdev reads too."
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

config = ConfigParser(delimiters=["="])
config.read("settings.ini", encoding="utf-8")
settings = config["DEFAULT"]

setup(
    name=settings["lib_name"],
    version=settings["version"],
    description=settings["description"],
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=settings["author"],
    author_email=settings["author_email"],
    url=settings["git_url"],
    license="Apache-2.0",
    keywords=settings["keywords"],
    python_requires=">=" + settings["min_python"],
    packages=[*find_packages(include=["llm_from_scratch", "llm_from_scratch.*"]), "llm_from_scratch.kernels"],
    package_dir={"llm_from_scratch.kernels": "kernels"},
    include_package_data=True,
    install_requires=settings["requirements"].split(),
    extras_require={
        name.removesuffix("_requirements"): text.split() for name, text in settings.items() if name.endswith("_requirements")
    },
    entry_points={"lm_eval.models": [settings["lm_eval_model"]]},
    zip_safe=False,
)
