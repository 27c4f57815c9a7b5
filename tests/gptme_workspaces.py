"""Workspaces in which every check of some of gptme's suites passes, as its prompts ask for them.

By the name of the test: content by path, laid over the test's own files. A function is given what
the test has at that path. `FLAWED` says what is wrong with a test of gptme's that such a workspace
does not pass, or one passes that nobody worked on.
"""

from __future__ import annotations


def replaced(*pairs):
    """Give a change of a file: each text of a pair by the other."""

    def change(text):
        for old, new in pairs:
            assert old in text, f"{old!r} is not in the test's file any more"
            text = text.replace(old, new)
        return text

    return change


def followed(addition):
    """Give a change of a file: more at its end."""
    return lambda text: text + addition


BASIC = {
    "hello": {"hello.py": 'print("Hello, world!")\n'},
    "hello-patch": {"hello.py": replaced(("world", "human"))},
    "hello-ask": {"hello.py": 'print(f"Hello, {input()}!")\n'},
    "prime100": {
        "prime.py": """\
primes = []
number = 2
while len(primes) < 100:
    if all(number % prime for prime in primes):
        primes.append(number)
    number += 1
print(primes[-1])
"""
    },
    "fix-bug": {"fib.py": replaced(("fibonacci(n) +", "fibonacci(n - 2) +"))},
    "read-modify": {
        "stats.py": """\
import csv

with open("data.csv") as file:
    values = [int(row["value"]) for row in csv.DictReader(file)]
print(f"count: {len(values)}")
print(f"mean: {sum(values) / len(values)}")
print(f"max: {max(values)}")
"""
    },
    "json-transform": {
        "transform.py": """\
import json

with open("products.json") as file:
    products = json.load(file)
sold = [{"name": p["name"], "revenue": p["price"] * p["quantity"]} for p in products]
total = sum(product["revenue"] for product in sold)
print(json.dumps({"products": sold, "total_revenue": total}))
"""
    },
    "multi-file-refactor": {
        "utils.py": replaced(("calcTotal", "calculate_total")),
        "main.py": replaced(("calcTotal", "calculate_total")),
    },
    "write-tests": {
        "test_mathlib.py": """\
import pytest
from mathlib import clamp, factorial, is_palindrome


def test_factorial():
    assert [factorial(n) for n in (0, 1, 5)] == [1, 1, 120]
    with pytest.raises(ValueError):
        factorial(-1)


def test_is_palindrome():
    assert is_palindrome("Never odd or even")
    assert not is_palindrome("odd")


def test_clamp():
    assert [clamp(n, 0, 10) for n in (-1, 5, 11)] == [0, 5, 10]
"""
    },
    "generate-cli": {
        "wordcount.py": """\
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("filename")
with open(parser.parse_args().filename) as file:
    print(len(file.read().split()))
"""
    },
    "extract-function": {
        "validators.py": """\
def validate_required_fields(data, fields):
    errors = []
    for field in fields:
        if field not in data:
            errors.append(f"missing {field}")
        elif not data[field]:
            errors.append(f"{field} is empty")
    return errors
""",
        "order.py": """\
from validators import validate_required_fields


def process_order(data):
    errors = validate_required_fields(data, ["product", "quantity", "price"])
    if errors:
        return {"ok": False, "errors": errors}
    return {"ok": True, "total": data["quantity"] * data["price"]}
""",
        "user.py": """\
from validators import validate_required_fields


def process_user(data):
    errors = validate_required_fields(data, ["name", "email", "age"])
    if errors:
        return {"ok": False, "errors": errors}
    return {"ok": True, "user": data["name"]}
""",
    },
    "debug-type-error": {"config.json": replaced(('"30"', "30"), ('"0.1"', "0.1"))},
    "find-and-fix": {
        "routes.py": replaced(("get_user", "fetch_user")),
        "report.py": replaced(("get_user", "fetch_user")),
    },
    "fix-import-error": {"math_ops.py": "def multiply(a, b):\n    return a * b\n"},
    "count-words": {
        "wordcount.py": """\
with open("words.txt") as file:
    print(f"words: {len(file.read().split())}")
"""
    },
    "json-filter": {
        "filter.py": """\
import json

with open("data.json") as file:
    people = json.load(file)
for name in sorted(person["name"] for person in people if person["score"] >= 80):
    print(name)
"""
    },
    "implement-class": {
        "shapes.py": followed(
            """

class Circle(Shape):
    def __init__(self, radius):
        self.radius = radius

    def area(self):
        return math.pi * self.radius**2

    def perimeter(self):
        return 2 * math.pi * self.radius


class Rectangle(Shape):
    def __init__(self, width, height):
        self.width, self.height = width, height

    def area(self):
        return self.width * self.height

    def perimeter(self):
        return 2 * (self.width + self.height)
"""
        )
    },
    "optimize-performance": {
        "main.py": replaced(
            ("import time\n", "import functools\nimport time\n"),
            ("def fibonacci", "@functools.cache\ndef fibonacci"),
        )
    },
}

SUITES = ("basic", *(f"practical{n}" for n in ("", 2, 5, 7, 10, 11, 14, 19, 27, 31, 32, 33)))

FLAWED = {
    "three-sum": "its case 7 asks for [-1, -1, 2] of numbers among which there is one -1",
    "optimize-performance": "on a fast machine, the slow program takes less than its 2 s as it is",
}

PRACTICAL = {
    # practical
    "build-api": {
        "server.py": """\
import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

ITEMS = [{"name": "apple", "price": 1.5}, {"name": "banana", "price": 0.75}]


class Handler(BaseHTTPRequestHandler):
    def answer(self, value):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def do_GET(self):
        self.answer(ITEMS)

    def do_POST(self):
        item = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ITEMS.append(item)
        self.answer(item)


port = int(sys.argv[1]) if len(sys.argv) > 1 else 8642
HTTPServer(("localhost", port), Handler).serve_forever()
"""
    },
    "parse-log": {
        "analyze.py": """\
import sys
from collections import Counter

with open(sys.argv[1]) as file:
    rows = [line.split() for line in file]
levels = Counter(row[2] for row in rows)
[(endpoint, count)] = Counter(row[4] for row in rows).most_common(1)
times = [int(row[6].removesuffix("ms")) for row in rows]
print(f"Total requests: {len(rows)}")
print(f"Errors: {levels['ERROR']}")
print(f"Warnings: {levels['WARNING']}")
print(f"Most common endpoint: {endpoint} ({count} requests)")
print(f"Average response time: {sum(times) / len(times):.0f}ms")
"""
    },
    "add-error-handling": {
        "processor.py": replaced(
            (
                "        result = process_record(record)",
                """\
        try:
            result = process_record(record)
        except (KeyError, TypeError, ValueError) as error:
            result = {"error": repr(error)}""",
            )
        )
    },
    # practical2
    "sort-and-filter": {
        "sort_filter.py": """\
import json

with open("employees.json") as file:
    people = [person for person in json.load(file) if person["age"] >= 28]
for person in sorted(people, key=lambda person: (person["dept"], person["name"])):
    print(f"{person['name']} ({person['dept']}): {person['age']}")
"""
    },
    "template-fill": {
        "fill_template.py": """\
import json
from pathlib import Path

order = json.loads(Path("order.json").read_text())
print(Path("template.txt").read_text().format(**order))
"""
    },
    "validate-csv": {
        "validate.py": """\
import csv


def problem(row):
    if not row["name"]:
        return "name is missing"
    if "@" not in row["email"]:
        return "email has no @"
    if not 0 <= int(row["age"]) <= 120:
        return "age is out of range"
    return None


with open("users.csv") as file:
    for number, row in enumerate(csv.DictReader(file), 1):
        found = problem(row)
        print(f"Row {number}: " + (f"INVALID ({found})" if found else "OK"))
"""
    },
    # practical5
    "rename-function": {
        "utils.py": replaced(("calc_total", "calculate_total")),
        "main.py": replaced(("calc_total", "calculate_total")),
        "test_utils.py": replaced(("calc_total", "calculate_total")),
    },
    "data-pipeline": {
        "pipeline.py": """\
import json
import sys

with open(sys.argv[1]) as file:
    people = json.load(file)
kept = [p for p in people if p["age"] >= 30 and p["years_experience"] >= 5]
for person in kept:
    person["seniority"] = "senior" if person["years_experience"] >= 10 else "mid"
print(f"Filtered employees: {len(kept)}")
print(f"Total salary: {sum(person['salary'] for person in kept)}")
years = sum(person["years_experience"] for person in kept) / len(kept)
print(f"Avg experience: {years:.2f} years")
"""
    },
    "regex-scrub": {
        "scrub.py": r"""
import re
import sys
from pathlib import Path

text = Path(sys.argv[1]).read_text()
text = re.sub(r"[\w.]+@[\w.]+\w", "[EMAIL]", text)
text = re.sub(r"\b\d{3}-\d{2}-\d{4}\b", "[SSN]", text)
text = re.sub(r"(\(\d{3}\) |\b\d{3}-)\d{3}-\d{4}\b", "[PHONE]", text)
print(text, end="")
"""
    },
    # practical7
    "ini-to-json": {
        "convert.py": """\
import json
import sys
from configparser import RawConfigParser

parser = RawConfigParser()
parser.read(sys.argv[1])
print(json.dumps({name: dict(parser[name]) for name in parser.sections()}, indent=2))
"""
    },
    "json-diff": {
        "diff_json.py": """\
import json
import sys

with open(sys.argv[1]) as old, open(sys.argv[2]) as new:
    before, after = json.load(old), json.load(new)


def compare(before, after, path=""):
    for key in sorted(before.keys() | after.keys()):
        where = f"{path}{key}"
        if key not in before:
            yield f"added: {where} = {after[key]}"
        elif key not in after:
            yield f"removed: {where} (was {before[key]})"
        elif isinstance(before[key], dict) and isinstance(after[key], dict):
            yield from compare(before[key], after[key], f"{where}.")
        elif before[key] != after[key]:
            yield f"changed: {where}: {before[key]} -> {after[key]}"


print("\\n".join(compare(before, after)))
""",
        # what an agent left behind that tried its script; the test asks for its own to be restored
        "old.json": "{}\n",
        "new.json": "not even JSON\n",
    },
    "changelog-gen": {
        "changelog.py": r"""
import re
import sys

HEADS = {"feat": "Features", "fix": "Fixes", "docs": "Documentation"}
sections = {head: [] for head in (*HEADS.values(), "Other")}
with open(sys.argv[1]) as file:
    for line in file:
        kind, scope, text = re.match(r"(\w+)(\(\w+\))?: (.*)", line).groups()
        sections[HEADS.get(kind, "Other")].append(f"- {scope} {text}" if scope else f"- {text}")
for head, commits in sections.items():
    if commits:
        print(f"### {head}", *commits, "", sep="\n")
"""
    },
    # practical10
    "semver-sort": {
        "semver_sort.py": """\
import sys


def key(version):
    numbers, _, pre = version.partition("-")
    return [int(number) for number in numbers.split(".")], not pre, pre


with open(sys.argv[1]) as file:
    for version in sorted(file.read().split(), key=key, reverse=True):
        print(version)
"""
    },
    "date-histogram": {
        "date_histogram.py": """\
import sys
from collections import Counter
from datetime import date

DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
with open(sys.argv[1]) as file:
    dates = [date.fromisoformat(line) for line in file.read().split()]
counts = Counter(DAYS[each.weekday()] for each in dates)
for day in DAYS:
    print(f"{day}: {counts[day]} ({100 * counts[day] / len(dates):.1f}%)")
[(busiest, count)] = counts.most_common(1)
print(f"Busiest: {busiest} ({count} occurrences)")
"""
    },
    "tsv-to-csv": {
        "tsv_to_csv.py": """\
import sys
import csv

with open(sys.argv[1], newline="") as source, open(sys.argv[2], "w", newline="") as target:
    rows = csv.reader(source, delimiter="\\t", quoting=csv.QUOTE_NONE)
    csv.writer(target, lineterminator="\\n").writerows(rows)
"""
    },
    # practical11
    "roman-numerals": {
        "roman.py": """\
VALUES = [1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1]
NUMERALS = "M CM D CD C XC L XL X IX V IV I".split()

with open("numbers.txt") as file:
    for number in map(int, file):
        text = ""
        for value, numeral in zip(VALUES, NUMERALS):
            text += numeral * (number // value)
            number %= value
        print(text)
"""
    },
    "run-length-encoding": {
        "rle.py": r"""
import itertools
import re


def encode(text):
    runs = ((letter, len(list(run))) for letter, run in itertools.groupby(text))
    return "".join(f"{count}{letter}" if count > 1 else letter for letter, count in runs)


def decode(text):
    return re.sub(r"(\d+)(\D)", lambda run: int(run[1]) * run[2], text)


with open("samples.txt") as file:
    for line in file.read().split():
        print(encode(line), decode(encode(line)))
"""
    },
    "anagram-groups": {
        "anagram_groups.py": """\
from collections import defaultdict

groups = defaultdict(list)
with open("words.txt") as file:
    for word in file.read().split():
        groups["".join(sorted(word.lower()))].append(word)
for group in sorted(sorted(group) for group in groups.values()):
    print(*group)
"""
    },
    # practical14
    "matrix-transpose": {
        "transpose.py": """\
with open("matrix.txt") as file:
    for column in zip(*(line.split() for line in file)):
        print(*column)
"""
    },
    "ipv4-classify": {
        "ipv4_classify.py": """\
from ipaddress import ip_address


def kind(address):
    if address.is_loopback:
        return "- loopback"
    first = address.packed[0]
    letter = next(name for name, end in zip("ABCDE", (127, 192, 224, 240, 256)) if first < end)
    if letter == "D":
        return "D multicast"
    return f"{letter} {'private' if address.is_private else 'public'}"


with open("ips.txt") as file:
    for line in file.read().split():
        print(line, kind(ip_address(line)))
"""
    },
    "bracket-balance": {
        "brackets.py": """\
PAIRS = {")": "(", "]": "[", "}": "{"}


def error(text):
    open_ones = []
    for position, bracket in enumerate(text, 1):
        if bracket not in PAIRS:
            open_ones.append((bracket, position))
        elif not open_ones or open_ones.pop()[0] != PAIRS[bracket]:
            return position
    return open_ones[0][1] if open_ones else None


with open("brackets.txt") as file:
    for line in file.read().split():
        found = error(line)
        print(line, "valid" if found is None else f"invalid at position {found}")
"""
    },
    # practical19
    "edit-distance": {
        "edit_distance.py": """\
def edit_distance(s1, s2):
    row = list(range(len(s2) + 1))
    for i, a in enumerate(s1, 1):
        above, row[0] = row[0], i
        for j, b in enumerate(s2, 1):
            above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (a != b))
    return row[-1]
"""
    },
    "bst-operations": {
        "bst.py": """\
class BST:
    def __init__(self):
        self.val = self.left = self.right = None

    def insert(self, val):
        if self.val is None:
            self.val, self.left, self.right = val, BST(), BST()
        elif val != self.val:
            (self.left if val < self.val else self.right).insert(val)

    def search(self, val):
        if self.val is None or val == self.val:
            return val == self.val
        return (self.left if val < self.val else self.right).search(val)

    def in_order(self):
        if self.val is None:
            return []
        return [*self.left.in_order(), self.val, *self.right.in_order()]
"""
    },
    "coin-change": {
        "coin_change.py": """\
def coin_change(coins, amount):
    least = [0] + [amount + 1] * amount
    for total in range(1, amount + 1):
        for coin in coins:
            if coin <= total:
                least[total] = min(least[total], least[total - coin] + 1)
    return least[amount] if least[amount] <= amount else -1
"""
    },
    # practical27
    "house-robber": {
        "house_robber.py": """\
def rob(nums):
    with_last = without_last = 0
    for value in nums:
        with_last, without_last = without_last + value, max(with_last, without_last)
    return max(with_last, without_last)
"""
    },
    "max-product-subarray": {
        "max_product_subarray.py": """\
def max_product(nums):
    best = low = high = nums[0]
    for value in nums[1:]:
        ends = value, low * value, high * value
        low, high = min(ends), max(ends)
        best = max(best, high)
    return best
"""
    },
    "find-all-anagrams": {
        "find_anagrams.py": """\
def find_anagrams(s, p):
    starts = range(len(s) - len(p) + 1)
    return [start for start in starts if sorted(s[start : start + len(p)]) == sorted(p)]
"""
    },
    # practical31
    "three-sum": {
        "three_sum.py": """\
from itertools import combinations


def three_sum(nums):
    triplets = {tuple(sorted(three)) for three in combinations(nums, 3) if sum(three) == 0}
    return [list(three) for three in triplets]
"""
    },
    "majority-element": {
        "majority_element.py": """\
def majority_element(nums):
    return max(nums, key=nums.count)
"""
    },
    "counting-bits": {
        "counting_bits.py": """\
def count_bits(n):
    return [number.bit_count() for number in range(n + 1)]
"""
    },
    # practical32
    "combination-sum": {
        "combination_sum.py": """\
def combination_sum(candidates, target):
    if target == 0:
        return [[]]
    return [
        [first, *rest]
        for index, first in enumerate(candidates)
        if first <= target
        for rest in combination_sum(candidates[index:], target - first)
    ]
"""
    },
    "generate-parentheses": {
        "generate_parentheses.py": """\
def generate_parentheses(n):
    if n == 0:
        return [""]
    return [
        f"({inner}){after}"
        for size in range(n)
        for inner in generate_parentheses(size)
        for after in generate_parentheses(n - 1 - size)
    ]
"""
    },
    "single-number": {
        "single_number.py": """\
def single_number(nums):
    return next(number for number in nums if nums.count(number) == 1)
"""
    },
    # practical33
    "product-except-self": {
        "product_except_self.py": """\
from math import prod


def product_except_self(nums):
    return [prod(nums[:index] + nums[index + 1 :]) for index in range(len(nums))]
"""
    },
    "find-duplicate": {
        "find_duplicate.py": """\
def find_duplicate(nums):
    return next(number for number in nums if nums.count(number) > 1)
"""
    },
    "missing-number": {
        "missing_number.py": """\
def missing_number(nums):
    return sum(range(len(nums) + 1)) - sum(nums)
"""
    },
}


def good(test):
    """Give the files of a workspace in which every check of a test passes."""
    files = dict(test["files"])
    for path, content in (BASIC | PRACTICAL)[test["name"]].items():
        files[path] = content(files[path]) if callable(content) else content
    return files
