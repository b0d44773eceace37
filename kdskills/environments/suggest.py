"""What a script seems to need beyond what is declared: from its imports, and from install lines of the skill's instructions.

Suggestions are told and never acted upon: nothing here runs code, and nothing is installed by it. A suggestion is *certain* where
the distribution behind an import is a known one; every other is a guess that distribution and import have one name.
"""

from __future__ import annotations

import ast
import posixpath
import re
import shlex
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kdskills.environments.model import EnvironmentSpec
from kdskills.environments.requirements import RequirementRefused, canonical_requirement
from kdskills.errors import FileRefused
from kdskills.skills.frontmatter import MAX_SKILL_BYTES
from kdskills.skills.safe_open import read_file, walk_tree

MAX_SCRIPT_BYTES: Final = 256 * 1024
"""Bytes of a script whose imports are looked at; the tree of a longer one takes too much memory."""
MAX_SCRIPTS: Final = 200
MAX_LINE: Final = 1_000

_NAMES = """
cv2 opencv-python-headless, PIL pillow, yaml pyyaml, bs4 beautifulsoup4, sklearn scikit-learn, skimage scikit-image,
docx python-docx, pptx python-pptx, fitz pymupdf, pymupdf pymupdf, dateutil python-dateutil, dotenv python-dotenv,
magic python-magic, jwt pyjwt, jose python-jose, slugify python-slugify, multipart python-multipart, git gitpython,
github pygithub, gitlab python-gitlab, telegram python-telegram-bot, discord discord-py, slack_sdk slack-sdk,
serial pyserial, usb pyusb, OpenSSL pyopenssl, Crypto pycryptodome, nacl pynacl, ldap3 ldap3, MySQLdb mysqlclient,
mysql mysql-connector-python, psycopg2 psycopg2-binary, psycopg psycopg[binary], pymongo pymongo, bson pymongo, redis redis,
googleapiclient google-api-python-client, google_auth_oauthlib google-auth-oauthlib, google.auth google-auth,
google.oauth2 google-auth, google.auth.transport.requests google-auth[requests], mcp mcp, mcp.server.fastmcp mcp<2, google_auth_httplib2 google-auth-httplib2, google.protobuf protobuf, google.genai google-genai,
google.generativeai google-generativeai, google.api_core google-api-core, google.cloud.storage google-cloud-storage,
google.cloud.bigquery google-cloud-bigquery, google.cloud.aiplatform google-cloud-aiplatform, vertexai google-cloud-aiplatform,
google.ads google-ads, azure.identity azure-identity, azure.storage.blob azure-storage-blob, azure.core azure-core,
pkg_resources setuptools, win32com pywin32, attr attrs, markdown markdown, markdown_it markdown-it-py, mdit_py_plugins
mdit-py-plugins, Levenshtein levenshtein, speech_recognition speechrecognition, pydub pydub, moviepy moviepy,
youtube_transcript_api youtube-transcript-api, yt_dlp yt-dlp, sentence_transformers sentence-transformers, faiss faiss-cpu,
umap umap-learn, hdbscan hdbscan, community python-louvain, igraph igraph, Bio biopython, rdkit rdkit, astropy astropy,
pdf2image pdf2image, pdfplumber pdfplumber, PyPDF2 pypdf2, pypdf pypdf, pikepdf pikepdf, reportlab reportlab, weasyprint
weasyprint, fpdf fpdf2, pytesseract pytesseract, ocrmypdf ocrmypdf, camelot camelot-py, tabula tabula-py, openpyxl openpyxl,
xlsxwriter xlsxwriter, xlrd xlrd, odf odfpy, ebooklib ebooklib, lxml lxml, defusedxml defusedxml, html5lib html5lib,
html2text html2text, markdownify markdownify, readability readability-lxml, trafilatura trafilatura, feedparser feedparser,
requests requests, requests_oauthlib requests-oauthlib, httpx httpx, aiohttp aiohttp, aiofiles aiofiles, urllib3 urllib3,
websockets websockets, websocket websocket-client, certifi certifi, tenacity tenacity, numpy numpy, pandas pandas,
polars polars, pyarrow pyarrow, duckdb duckdb, scipy scipy, statsmodels statsmodels, sympy sympy, networkx networkx,
matplotlib matplotlib, mpl_toolkits matplotlib, seaborn seaborn, plotly plotly, kaleido kaleido, imageio imageio,
geopandas geopandas, shapely shapely, pyproj pyproj, folium folium, torch torch, torchvision torchvision,
transformers transformers, datasets datasets, tokenizers tokenizers, tiktoken tiktoken, huggingface_hub huggingface-hub,
openai openai, anthropic anthropic, mcp mcp, fastmcp fastmcp, langchain langchain, litellm litellm, boto3 boto3,
botocore botocore, playwright playwright, selenium selenium, flask flask, fastapi fastapi, uvicorn uvicorn, django django,
starlette starlette, pydantic pydantic, pydantic_settings pydantic-settings, sqlalchemy sqlalchemy, jinja2 jinja2,
click click, typer typer, rich rich, tqdm tqdm, tabulate tabulate, colorama colorama, termcolor termcolor, toml toml,
tomli tomli, tomlkit tomlkit, tomli_w tomli-w, ruamel.yaml ruamel-yaml, frontmatter python-frontmatter,
jsonschema jsonschema, chardet chardet, charset_normalizer charset-normalizer, pytz pytz, tzdata tzdata, psutil psutil,
packaging packaging, pytest pytest, hypothesis hypothesis, cryptography cryptography, paramiko paramiko, nltk nltk,
spacy spacy, gensim gensim, textblob textblob, yfinance yfinance, stripe stripe, qrcode qrcode, icalendar icalendar,
typing_extensions typing-extensions, kubernetes kubernetes, docker docker, ipykernel ipykernel,
nbformat nbformat, nbconvert nbconvert, xmltodict xmltodict, extract_msg extract-msg, msoffcrypto msoffcrypto-tool, GPUtil gputil,
SPARQLWrapper sparqlwrapper, Cython cython,
notion_client notion-client, IPython ipython, fontTools fonttools, zmq pyzmq, whois python-whois, nmap python-nmap,
barcode python-barcode, wikipediaapi wikipedia-api, duckduckgo_search duckduckgo-search, serpapi google-search-results,
newspaper newspaper3k, ffmpeg ffmpeg-python, whisper openai-whisper, edge_tts edge-tts, llama_index llama-index,
qdrant_client qdrant-client, weaviate weaviate-client, pydantic_ai pydantic-ai, sentry_sdk sentry-sdk, jsonpath_ng
jsonpath-ng, diff_match_patch diff-match-patch, more_itertools more-itertools, netCDF4 netcdf4, SimpleITK simpleitk,
cairo pycairo, webvtt webvtt-py, pre_commit pre-commit, tree_sitter tree-sitter, antlr4 antlr4-python3-runtime,
opensearchpy opensearch-py, cassandra cassandra-driver, snowflake.connector snowflake-connector-python,
clickhouse_connect clickhouse-connect, kafka kafka-python, confluent_kafka confluent-kafka, paho paho-mqtt, grpc grpcio,
flask_cors flask-cors, argon2 argon2-cffi, dns dnspython, email_validator email-validator, atlassian
atlassian-python-api, hubspot hubspot-api-client, simple_salesforce simple-salesforce, plaid plaid-python, eth_account
eth-account, pdfminer pdfminer-six, requests_cache requests-cache, requests_toolbelt requests-toolbelt, curl_cffi
curl-cffi, fake_useragent fake-useragent, browser_use browser-use, prompt_toolkit prompt-toolkit, absl absl-py, hydra
hydra-core, decouple python-decouple, pynvml nvidia-ml-py, langchain_core langchain-core, langchain_openai
langchain-openai, langchain_community langchain-community, langchain_anthropic langchain-anthropic, slack_bolt
slack-bolt, openapi_spec_validator openapi-spec-validator, prometheus_client prometheus-client, faster_whisper
faster-whisper, flask_sqlalchemy flask-sqlalchemy, pyasn1_modules pyasn1-modules, socks pysocks, engineio
python-engineio, socketio python-socketio, gi pygobject, wx wxpython, OpenGL pyopengl, memcache python-memcached, snappy
python-snappy, editor python-editor, jks pyjks, xdg pyxdg, Xlib python-xlib, hcl2 python-hcl2, elftools pyelftools, dbus
dbus-python, ibm_db ibm-db, skopt scikit-optimize, imblearn imbalanced-learn, tavily tavily-python, exa_py exa-py,
firecrawl firecrawl-py, O365 o365, e2b_code_interpreter e2b-code-interpreter, google.cloud.vision google-cloud-vision,
google.cloud.texttospeech google-cloud-texttospeech, google.cloud.speech google-cloud-speech, google.cloud.translate
google-cloud-translate, google.cloud.firestore google-cloud-firestore, google.cloud.secretmanager
google-cloud-secret-manager, google.cloud.pubsub_v1 google-cloud-pubsub, google.analytics.data_v1beta
google-analytics-data, azure.mgmt.resource azure-mgmt-resource, azure.ai.inference azure-ai-inference,
azure.keyvault.secrets azure-keyvault-secrets, azure.cosmos azure-cosmos,
pywt pywavelets, ydata_profiling ydata-profiling, great_expectations great-expectations, rank_bm25 rank-bm25,
deep_translator deep-translator, pandas_datareader pandas-datareader, lxml_html_clean lxml-html-clean, gradio_client
gradio-client, llama_cpp llama-cpp-python, semantic_kernel semantic-kernel, facebook_business facebook-business,
pretty_midi pretty-midi, rapidjson python-rapidjson, finnhub finnhub-python
"""
_SAME = """
accelerate addict adlfs agate aioboto3 aiomysql aiopg aiosqlite akshare alembic altair anndata ansible anyio appdirs
apscheduler arcade arch argcomplete arrow arviz arxiv asana ase astor asyncpg asyncssh authlib babel backtrader bandit
baostock bcrypt bibtexparser bidict black bleach blessed bm25s bokeh boltons boto bottleneck bqplot brotli cachetools
cadquery cairocffi cairosvg caldav cartopy casadi catboost cattrs ccxt celery cerberus cffi chevron chromadb
cloudscraper cohere colander colorlog commonmark configargparse contextily cookiecutter copier coverage crawl4ai crewai
croniter cssselect cssselect2 cssutils csvkit cvxpy dacite darts dash dask dataset dateparser ddgs deap deepdiff
diagrams diffusers diskcache distro docling docopt docutils docx2pdf docx2txt docxtpl dramatiq drawsvg dropbox dspy dvc
dynaconf easyocr elasticsearch elevenlabs emoji environs evaluate exchangelib exifread ezdxf fabric faker fastai
fastparquet feedgen filelock fiona fire flair flake8 flax formulas fredapi freezegun frozendict fsspec ftfy ftputil
fugashi fuzzywuzzy gcsfs gekko geocoder geopy gevent glom gpxpy gql gradio graphviz greenlet groq gspread gtts gunicorn
h3 h5py habanero halo haversine hjson holidays html2image httplib2 humanize hvac hypercorn ics ijson imagehash
imapclient img2pdf imgkit inflect inquirer instaloader instructor invoke isort itsdangerous jax jedi jellyfish jieba
jira jmespath joblib json5 jsonlines jsonmerge jsonpatch jsonpointer jsonref jupytext keras keyboard keyring kneed
langdetect langfuse langgraph langsmith lark libcst librosa lifelines lightgbm lightning linearmodels locust logfire
loguru lz4 m3u8 mako mammoth markdown2 markitdown marko markupsafe marshmallow marvin mechanicalsoup mechanize
meilisearch meshio mido mimesis minio missingno mistletoe mistralai mistune mkdocs mlflow mne moderngl modin molecule
moto motor mpmath msal msgpack msgspec mss munch music21 mutagen mwclient mwparserfromhell nbclient neo4j netaddr
netmiko nextcord nibabel nox numba numexpr oauthlib olefile ollama omegaconf onnx onnxruntime open3d opensimplex optuna
oracledb orjson ortools osmnx outlines owlready2 pandera papermill parsel parso passlib pathspec pdf2docx pdfkit pdfrw
peewee peft pendulum petl pexpect pgvector phonenumbers piexif pika pinecone pingouin pip platformdirs pluggy plumbum
ply pmdarima polyline portalocker praw premailer prettytable prophet ptyprocess pulp pulumi py7zr pyalex pyautogui
pybtex pycoingecko pycountry pycurl pydicom pydot pyecharts pyexcel pyfiglet pygad pygal pygame pyglet pygments
pygraphviz pykalman pylatex pylint pymatgen pymc pymilvus pymupdf4llm pymysql pynput pyod pyodbc pyomo pyotp pypandoc
pyparsing pypdfium2 pyperclip pyphen pypinyin pyppeteer pyquery pyrender pyrogram pyrsistent pysam pysftp pyspark pysrt
pystache pytrends pyttsx3 pyvirtualdisplay pyvis pyvista pyxlsb pyzbar quantstats questionary radon rapidfuzz rarfile
rasterio rawpy ray rdflib regex replicate responses respx rq s3fs sacrebleu sanic scanpy scapy scenedetect schedule
schema scholarly scp scrapy segno selectolax semver sendgrid sh shap simplejson simplekml simpy six sktime solana
solders sortedcontainers sounddevice soundfile sphinx sqlglot sqlmodel sqlparse squarify srt stanza streamlit striprtf
structlog supabase svglib svgpathtools svgutils svgwrite sweetviz ta tables tablib telethon tensorboard tensorflow
textdistance textract textstat texttable textual thefuzz thrift tika timm tinycss2 tinydb tldextract toolz tornado tox
trimesh trio tsfresh tslearn tushare tweepy twilio twisted typesense tzlocal ujson unidecode unstructured untangle urwid
validators vectorbt vobject voluptuous vosk vtk vulture w3lib wand wandb watchdog wbgapi web3 werkzeug wheel wikipedia
wordcloud wordfreq xarray xgboost xhtml2pdf xlsx2csv xlwings xlwt xmlschema yahooquery yamllint yaspin zarr zeep
zstandard
"""
DISTRIBUTIONS: Final = MappingProxyType(
    {name: name for name in _SAME.split()} | dict(pair.split() for pair in " ".join(_NAMES.split()).split(","))
)
"""The distribution behind an import; the longest name that an import begins with counts. `_SAME` are well-known ones of one name."""

_SHARED = frozenset({"google", "azure", "ruamel", "zope", "backports"})  # names that many distributions lie below
_NOT_PACKAGED = frozenset(
    {
        "uno",
        "unohelper",
        "apt",
        "bpy",
        "urllib2",
        "urlparse",
        "ConfigParser",
        "StringIO",
        "cStringIO",
        "Queue",
        "Tkinter",
    }
    | {
        "__builtin__",
        "httplib",
        "cPickle",
        "commands",
        "HTMLParser",
        "distutils",
        "imp",
        "kdskills",
        "kdskills_runtime",
    }
)
_FORGIVING = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})
_EXITS = frozenset({"exit", "quit", "_exit", "abort"})
_RUNNERS = frozenset({"run", "call", "check_call", "check_output", "Popen", "which", "create_subprocess_exec"})
_FENCE = re.compile(r"\s{0,3}(```+|~~~+)")
_PIP = re.compile(r"(?:python[\d.]*\s+-m\s+|py\s+-m\s+|uv\s+)?pip[\d.]*\s+install\s+(.*)")
_NPM = re.compile(r"npm\s+(?:install|i|add)\s+(.*)")
_PROMPT = re.compile(r"\s*(?:[$%>!]\s*)?(?:sudo\s+)?")
_WITH_VALUE = frozenset(
    {"-r", "-c", "-e", "-f", "-i", "-t", "--requirement", "--constraint", "--editable", "--find-links", "--index-url"}
    | {"--extra-index-url", "--target", "--python", "--prefix", "--root", "--registry"}
)
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_NODE_WORD = re.compile(r"(@[\w.~-]+/)?[\w.~-]+(@[\w.~^<>=*-]+)?")


class SuggestedPackage(NamedTuple):
    """A package that a script seems to need.

    Attributes:
        requirement: Its distribution, canonical; of an install line with the versions it asks for.
        path: File that shows it, posix in the skill, and `line` from 1.
        module: What is imported; empty for an install line.
        certain: Whether the distribution is known to hold the module, or an install line of the skill names it.
        optional: Whether the program goes on without it.
        node: Whether it is a package of Node.
    """

    requirement: str
    path: str
    line: int
    module: str = ""
    certain: bool = False
    optional: bool = False
    node: bool = False

    @property
    def name(self) -> str:
        """The distribution's canonical name."""
        return self.requirement if self.node else canonicalize_name(Requirement(self.requirement).name)


class ScriptFacts(NamedTuple):
    """What the text of a Python script shows: packages it imports and programs it starts by a literal name.

    `modules` are the files of the skill that it imports, whose packages and programs are among these; `starts` tells
    whether it asks for `__main__`, as what is both a program and a module does.
    """

    packages: tuple[SuggestedPackage, ...] = ()
    programs: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    starts: bool = False


def declared_names(spec: EnvironmentSpec) -> frozenset[str]:
    """Return the canonical names of the Python packages of *spec*."""
    return frozenset(canonicalize_name(Requirement(each).name) for each in spec.requirements)


class _FileFacts(NamedTuple):
    """What one Python file shows by itself, with the files of the skill it imports."""

    packages: tuple[SuggestedPackage, ...] = ()
    programs: frozenset[str] = frozenset()
    modules: tuple[str, ...] = ()
    starts: bool = False


def skill_facts(folder: Path) -> Mapping[str, ScriptFacts]:
    """Return what each Python file of the skill in *folder* shows, with what it imports from the skill, by path.

    A file that cannot be read or parsed shows nothing; more than `MAX_SCRIPTS` are not looked at.
    """
    try:
        tree = [entry.path for entry in walk_tree(folder) if entry.kind == "file" and entry.path.endswith(".py")]
    except FileRefused:
        return {}
    paths = frozenset(tree[:MAX_SCRIPTS])
    skill_names = {part for path in tree for part in path.removesuffix(".py").split("/")}
    files = {path: _file_facts(folder, path, paths, skill_names) for path in sorted(paths)}
    return {path: _joined(path, files) for path in files}


def _joined(path: str, files: Mapping[str, _FileFacts]) -> ScriptFacts:
    """Return the facts of a file and of all it imports from the skill."""
    reached, pending = {path: None}, [path]
    while pending:
        fresh = [module for module in files[pending.pop()].modules if module not in reached]
        reached |= dict.fromkeys(fresh)
        pending += fresh
    packages: dict[str, SuggestedPackage] = {}
    for package in (package for each in reached for package in files[each].packages):
        earlier = packages.get(package.name)
        if earlier is None or _strength(package) > _strength(earlier):
            packages[package.name] = package
    programs = frozenset[str]().union(*(files[each].programs for each in reached))
    return ScriptFacts(
        tuple(sorted(packages.values())), tuple(sorted(programs)), tuple(reached)[1:], files[path].starts
    )


def _strength(package: SuggestedPackage) -> tuple[bool, int]:
    """Return what makes one of two suggestions of a distribution count: it is demanded, then it asks for extras."""
    return not package.optional, len(package.requirement)


def _file_facts(folder: Path, path: str, paths: Collection[str], skill_names: Collection[str]) -> _FileFacts:
    try:
        data = read_file(folder, path, limit=MAX_SCRIPT_BYTES).data
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in texts, which are the author's matter
            tree = ast.parse(data)
    except (FileRefused, SyntaxError, ValueError, RecursionError, MemoryError):
        return _FileFacts()
    packages: list[SuggestedPackage] = []
    modules: dict[str, None] = {}
    for module, line, optional in sorted(_imports(tree), key=itemgetter(1)):
        top = module.partition(".")[0]
        if top in skill_names or not top:
            modules |= dict.fromkeys(_module_files(module, path, paths))
        elif top not in sys.stdlib_module_names and top not in _NOT_PACKAGED:
            name, certain = distribution_of(module)
            if certain or _NAME.fullmatch(name):  # else an import, but no name a package may have
                label = module if top in _SHARED else top
                packages.append(SuggestedPackage(name, path, line, label, certain, optional))
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    programs = frozenset(name for call in calls for name in _program(call))
    return _FileFacts(tuple(packages), programs, tuple(modules), b"__main__" in data)


def _module_files(module: str, importer: str, paths: Collection[str]) -> list[str]:
    """Return the files of the skill that a module's name, as written in *importer*, may mean."""
    parts = module.lstrip(".").split(".")
    level = len(module) - len(module.lstrip("."))
    above = posixpath.dirname(importer).split("/")
    bases = ["/".join(above[: len(above) - level + 1])] if level else [posixpath.dirname(importer), "scripts", ""]
    for base in bases:
        stems = (posixpath.join(base, *parts[:count]) for count in range(1, len(parts) + 1))
        names = [name for stem in stems for name in (f"{stem}.py", f"{stem}/__init__.py") if name in paths]
        if names:
            return names
    return []


def distribution_of(module: str) -> tuple[str, bool]:
    """Return the requirement of the distribution that gives a dotted module, canonical, and whether that is known or a guess."""
    parts = module.split(".")
    for count in range(len(parts), 0, -1):
        if distribution := DISTRIBUTIONS.get(".".join(parts[:count])):
            return distribution, True
    return canonicalize_name("-".join(parts[:3]) if parts[0] in _SHARED else parts[0]), False


def _imports(tree: ast.Module) -> Iterator[tuple[str, int, bool]]:
    """Yield each import that running the program can reach: dotted name, line, and whether it does without."""
    pending: list[tuple[Iterable[ast.stmt], bool]] = [(tree.body, False)]
    while pending:  # no recursion: a chain of `elif` may be deeper than any stack
        body, optional = pending.pop()
        for node in body:
            if isinstance(node, ast.Import):
                yield from ((alias.name, node.lineno, optional) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = "." * node.level + (f"{node.module}." if node.module else "")
                yield from ((base + alias.name, node.lineno, optional) for alias in node.names)
            elif isinstance(node, ast.If) and _is_for_types(node.test):
                pending.append((node.orelse, optional))
            elif isinstance(node, ast.Try | ast.TryStar):
                guarded = optional or any(_forgives(handler) for handler in node.handlers)
                handled = (statement for handler in node.handlers for statement in handler.body)
                pending += [(node.body, guarded), (handled, guarded), (node.orelse, optional)]
                pending.append((node.finalbody, optional))
            else:
                blocks = [getattr(node, name, []) for name in ("body", "orelse")]
                blocks += [case.body for case in getattr(node, "cases", [])]
                pending += [(block, optional) for block in blocks]


def _is_for_types(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")
    return name == "TYPE_CHECKING"


def _forgives(handler: ast.ExceptHandler) -> bool:
    """Whether a program goes on after an import failed: the handler takes that error, and does not end the program."""
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    if not any(kind is None or getattr(kind, "id", "") in _FORGIVING for kind in kinds):
        return False
    for statement in handler.body:
        call = statement.value if isinstance(statement, ast.Expr) else None
        ends = isinstance(call, ast.Call) and (getattr(call.func, "attr", "") or getattr(call.func, "id", "")) in _EXITS
        if ends or isinstance(statement, ast.Raise):
            return False
    return True


def _program(call: ast.Call) -> Iterator[str]:
    """Yield the name of the program that a call of `subprocess` or `shutil.which` names literally."""
    name = getattr(call.func, "attr", "") or getattr(call.func, "id", "")
    if name not in _RUNNERS or not call.args:
        return
    first = call.args[0]
    first = first.elts[0] if isinstance(first, ast.List | ast.Tuple) and first.elts else first
    shell_line = name not in {"which", "create_subprocess_exec"} and first is call.args[0]
    if isinstance(first, ast.Constant) and isinstance(first.value, str) and not shell_line:
        word = first.value
        if re.fullmatch(r"[A-Za-z0-9][\w.+-]{0,63}", word, re.ASCII):
            yield word


def install_lines(folder: Path, file_name: str = "SKILL.md") -> tuple[SuggestedPackage, ...]:
    """Return packages that code blocks of the instructions in *folder* install with pip, `uv pip` or npm, each once."""
    packages: dict[tuple[bool, str], SuggestedPackage] = {}
    for number, command in _block_commands(folder, file_name):
        for requirement, node in _installed(command):
            package = SuggestedPackage(requirement, file_name, number, certain=True, node=node)
            packages.setdefault((node, package.name), package)
    return tuple(sorted(packages.values()))


CALLED_PROGRAMS: Final = MappingProxyType(
    {"gitpython": "git", "pdf2image": "pdftoppm", "pytesseract": "tesseract", "pypandoc": "pandoc", "pydub": "ffmpeg"}
)
"""Programs without which a distribution does nothing."""


def first_words(folder: Path, file_name: str = "SKILL.md") -> frozenset[str]:
    """Return the first words of what code blocks of the instructions in *folder* run: names of programs, and much else."""
    return frozenset(command.partition(" ")[0] for _, command in _block_commands(folder, file_name))


def _block_commands(folder: Path, file_name: str) -> Iterator[tuple[int, str]]:
    """Yield what stands in code blocks of the instructions as a shell would part it, with numbers of lines."""
    try:
        text = read_file(folder, file_name, limit=MAX_SKILL_BYTES).data.decode("utf-8", "replace")
    except FileRefused:
        return
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        mark = _FENCE.match(line)
        if mark and (not fence or mark[1].startswith(fence)):
            fence = "" if fence else mark[1]
        elif fence and len(line) <= MAX_LINE:
            for command in re.split(r"&&|\|\|?|;(?!\s*\w+\s*[<>=!])", _PROMPT.sub("", line, count=1)):
                yield number, command.strip()


def _installed(command: str) -> Iterator[tuple[str, bool]]:
    """Yield what a command of a shell installs, and whether that is a package of Node."""
    npm = _NPM.match(command)
    match = npm or _PIP.match(command)
    if match is None:
        return
    try:
        words = shlex.split(match[1], comments=True)
    except ValueError:  # a quote that is not closed
        return
    for before, word in zip(["", *words], words, strict=False):
        if word.startswith("-") or before in _WITH_VALUE:
            continue
        if npm is not None:
            if node := _NODE_WORD.fullmatch(word):
                yield node[0], True
            continue
        try:
            yield canonical_requirement(word), False
        except RequirementRefused:
            continue


def script_block_text(requirements: Iterable[str], requires_python: str = "") -> str:
    """Return the lines of inline metadata that declare *requirements*, to stand at the beginning of a script."""
    lines = [
        "# /// script",
        *([f'# requires-python = "{requires_python}"'] if requires_python else []),
        "# dependencies = [",
    ]
    lines += [f"#   {quoted(each)}," for each in sorted(requirements)]
    return "\n".join([*lines, "# ]", "# ///", ""])


def quoted(requirement: str) -> str:
    """Return a requirement as a text of TOML; the texts of markers stand in double quotes."""
    return f"'{requirement}'" if '"' in requirement else f'"{requirement}"'
