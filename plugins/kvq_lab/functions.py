"""Functions of made-up services and requests for them, drawn by a seed: `task=tools` without files.

A family is a function with the ways in which it is asked for. Its parameters draw their values from the lists below;
an optional one is asked for in half of the requests, by a clause that stands nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvq_lab.calls import Function, Request, Schema, allow_values

# Added to the seed of a generator, so that no other use of the same seed draws the same numbers.
_REQUESTS, _SHOTS = 0x746F6F6C, 0x73686F74

CITIES = "Lisbon Oslo Nairobi Lima Kyoto Austin Bergen Dublin Cairo Turin Porto Quito Hanoi Leeds Perth".split()
PEOPLE = "Alice Bruno Carla David Elena Farid Greta Hugo Irene Jonas Karim Lucia Marta Nadia Oscar Paula".split()
FOODS = "apples rice bread eggs lemons onions carrots butter olives beans pasta honey mushrooms spinach".split()
LANGUAGES = "French German Spanish Italian Turkish Polish Swedish Greek Finnish Dutch".split()
CURRENCIES = "USD EUR GBP JPY CHF SEK NOK PLN BRL INR".split()
ROOMS = "kitchen bedroom hallway office garage bathroom balcony cellar attic nursery".split()
COMPANIES = "Northwind Halden Brightwater Corvex Lumina Stonebridge Aldertech Fennel Quarry Redwood".split()
TITLES = (
    "budget review,design meeting,dentist appointment,piano lesson,team lunch,project kickoff,yoga class,job interview"
).split(",")
TOPICS = "solar panels,bread baking,deep sea fish,chess openings,old maps,jazz guitar,bird migration,glass art".split(
    ","
)
STREETS = "Mill Lane,Harbour Street,Oak Avenue,Station Road,Castle Hill,River Walk,Park Row,Bridge Street".split(",")
SONGS = "Blue Morning,Paper Boats,Silver Road,The Long Way Home,Quiet Hours,Northern Light,Falling Leaves".split(",")
FILES = "notes.txt report.pdf photo.png budget.csv slides.odp thesis.tex backup.zip draft.md".split()
PHRASES = (
    "good morning,where is the station,thank you very much,see you tomorrow,the bill please,happy birthday"
).split(",")


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function.

    Attributes:
        schema: of its value.
        draw: a value.
        clause: of an optional one, what a request says where it is given, with {} for the value.
        phrase: how a request says a value.
    """

    name: str
    schema: Schema
    draw: Callable[[np.random.Generator], Any]
    clause: str | None = None
    phrase: Callable[[Any], str] = str


@dataclass(frozen=True)
class Family:
    """A function and the ways in which a request asks for it, as templates over its parameters."""

    name: str
    description: str
    parameters: tuple[Parameter, ...]
    templates: tuple[str, ...]

    @property
    def function(self) -> Function:
        """The function as it is offered."""
        return Function(self.name, self.description, _object_schema(self.parameters))


@dataclass(frozen=True)
class DrawnRequest:
    """A family's function with values for its arguments, and the request that asks for them."""

    function: Function
    text: str
    arguments: dict[str, Any]


def _object_schema(parameters: Sequence[Parameter]) -> Schema:
    return {
        "type": "object",
        "properties": {one.name: one.schema for one in parameters},
        "required": [one.name for one in parameters if one.clause is None],
    }


def _describe(schema: Schema, about: str) -> Schema:
    return schema | ({"description": about} if about else {})


def _text(name: str, values: Sequence[str], clause: str | None = None, about: str = "") -> Parameter:
    return Parameter(name, _describe({"type": "string"}, about), lambda rng: _draw_one(rng, values), clause)


def _enum(name: str, options: str, clause: str | None = None) -> Parameter:
    values = options.split()
    return Parameter(name, {"type": "string", "enum": values}, lambda rng: _draw_one(rng, values), clause)


def _int(name: str, low: int, high: int, step: int = 1, clause: str | None = None, about: str = "") -> Parameter:
    schema = _describe({"type": "integer"}, about)
    return Parameter(name, schema, lambda rng: low + step * int(rng.integers((high - low) // step + 1)), clause)


def _number(name: str, low: int, high: int, about: str = "") -> Parameter:
    """A number with one decimal that is no integer."""
    schema = _describe({"type": "number"}, about)
    return Parameter(name, schema, lambda rng: int(rng.integers(low, high)) + int(rng.integers(1, 10)) / 10)


def _flag(name: str, clause: str) -> Parameter:
    return Parameter(name, {"type": "boolean"}, lambda rng: True, clause)


def _date(name: str = "date", clause: str | None = None) -> Parameter:
    schema = {"type": "string", "description": "YYYY-MM-DD"}
    return Parameter(
        name, schema, lambda rng: f"2025-{int(rng.integers(1, 13)):02d}-{int(rng.integers(1, 29)):02d}", clause
    )


def _time(name: str = "time", clause: str | None = None) -> Parameter:
    schema = {"type": "string", "description": "HH:MM"}
    return Parameter(
        name, schema, lambda rng: f"{int(rng.integers(7, 22)):02d}:{15 * int(rng.integers(4)):02d}", clause
    )


def _list(inner: Parameter, clause: str | None = None, least: int = 2, most: int = 3) -> Parameter:
    """A list of values of `inner`, which gives it its name, each once."""

    def draw(rng: np.random.Generator) -> list[Any]:
        drawn: list[Any] = []
        count = int(rng.integers(least, most + 1))
        while len(drawn) < count:
            value = inner.draw(rng)
            if value not in drawn:
                drawn.append(value)
        return drawn

    def phrase(values: list[Any]) -> str:
        *first, last = [inner.phrase(value) for value in values]
        return f"{', '.join(first)} and {last}" if first else last

    return Parameter(inner.name, {"type": "array", "items": inner.schema}, draw, clause, phrase)


def _nested(name: str, template: str, *parameters: Parameter, clause: str | None = None) -> Parameter:
    """An object of fields, of which one is drawn each; a request says it by `template`."""

    def draw(rng: np.random.Generator) -> dict[str, Any]:
        return {one.name: one.draw(rng) for one in parameters}

    def phrase(value: dict[str, Any]) -> str:
        return template.format(**{one.name: one.phrase(value[one.name]) for one in parameters})

    return Parameter(name, _object_schema(parameters), draw, clause, phrase)


def _draw_one(rng: np.random.Generator, values: Sequence[str]) -> str:
    return values[int(rng.integers(len(values)))]


_ADDRESS = _nested(
    *("address", "{number} {street}, {city}"),
    *(_int("number", 1, 180), _text("street", STREETS), _text("city", CITIES)),
)

FAMILIES: tuple[Family, ...] = (
    Family("get_weather", "Current weather in a city.",
           (_text("city", CITIES), _enum("unit", "celsius fahrenheit", " in {}")),
           ("What is the weather in {city}{unit}?", "Tell me the current weather in {city}{unit}.")),
    Family("get_forecast", "Weather forecast for the coming days.",
           (_text("city", CITIES), _int("days", 2, 9)),
           ("Give me the forecast for {city} for the next {days} days.", "How will {city} be over {days} days?")),
    Family("create_event", "Add an event to the calendar.",
           (_text("title", TITLES), _date(), _time(), _int("minutes", 15, 120, 15, ", {} minutes long")),
           ("Add a {title} on {date} at {time}{minutes}.", "Put a {title} into my calendar: {date}, {time}{minutes}.")),
    Family("delete_event", "Remove an event from the calendar.",
           (_text("title", TITLES), _date()),
           ("Cancel the {title} on {date}.", "Please delete my {title} of {date}.")),
    Family("list_events", "Events of a day.",
           (_date(), _enum("calendar", "work home family", " in the {} calendar")),
           ("What is planned on {date}{calendar}?", "Show the events of {date}{calendar}.")),
    Family("convert_length", "Convert a length between units.",
           (_number("value", 1, 90), _enum("source", "km mile foot inch"), _enum("target", "metre yard cm mm")),
           ("How much is {value} {source} in {target}?", "Convert {value} from {source} to {target}.")),
    Family("convert_currency", "Convert an amount of money.",
           (_int("amount", 20, 900, 5), _text("source", CURRENCIES[:5]), _text("target", CURRENCIES[5:])),
           ("Convert {amount} {source} to {target}.", "What are {amount} {source} worth in {target}?")),
    Family("convert_temperature", "Convert a temperature.",
           (_int("degrees", -20, 110), _enum("target", "celsius fahrenheit kelvin")),
           ("What are {degrees} degrees in {target}?", "Convert {degrees} degrees to {target}.")),
    Family("search_web", "Search the web.",
           (_text("query", TOPICS), _int("limit", 3, 20, 1, ", {} results")),
           ("Search the web for {query}{limit}.", "Find pages about {query}{limit}.")),
    Family("search_news", "Search recent news.",
           (_text("topic", TOPICS), _text("language", LANGUAGES, " in {}")),
           ("Find news about {topic}{language}.", "Any recent news on {topic}{language}?")),
    Family("search_files", "Find files by name.",
           (_text("name", FILES), _enum("folder", "documents downloads desktop", " in {}"),
            _flag("recursive", ", subfolders too")),
           ("Find the file {name}{folder}{recursive}.", "Look for {name}{folder}{recursive}.")),
    Family("send_mail", "Send an e-mail.",
           (_list(_text("to", PEOPLE), least=1), _text("subject", TITLES), _flag("urgent", ", marked as urgent")),
           ("Send a mail to {to} with the subject {subject}{urgent}.", "Mail {to} about: {subject}{urgent}.")),
    Family("send_message", "Send a text message.",
           (_text("to", PEOPLE), _text("text", PHRASES)),
           ("Text {to}: {text}", "Send {to} the message: {text}")),
    Family("call_contact", "Call somebody.",
           (_text("name", PEOPLE), _enum("device", "mobile landline", " on the {}")),
           ("Call {name}{device}.", "Please ring {name}{device}.")),
    Family("set_timer", "Start a timer.",
           (_int("minutes", 2, 90), _text("label", FOODS, " for the {}")),
           ("Set a timer of {minutes} minutes{label}.", "Start a {minutes} minute timer{label}.")),
    Family("set_alarm", "Set an alarm.",
           (_time(), _list(_enum("days", "monday tuesday wednesday thursday friday saturday sunday"), " on {}")),
           ("Wake me at {time}{days}.", "Set an alarm for {time}{days}.")),
    Family("add_numbers", "Sum of numbers.",
           (_list(_int("numbers", 2, 400), most=4),),
           ("What is the sum of {numbers}?", "Add up {numbers}.")),
    Family("multiply", "Product of two numbers.",
           (_int("first", 3, 99), _int("second", 3, 99)),
           ("What is {first} times {second}?", "Multiply {first} by {second}.")),
    Family("power", "A base to an exponent.",
           (_int("base", 2, 19), _int("exponent", 2, 9)),
           ("Raise {base} to the power of {exponent}.", "Compute {base} to the {exponent}.")),
    Family("percentage", "A percentage of a number.",
           (_int("percent", 5, 95, 5), _int("value", 40, 900, 10)),
           ("What is {percent} percent of {value}?", "Compute {percent} percent of {value}.")),
    Family("round_number", "Round a number.",
           (_number("value", 10, 900), _enum("direction", "up down nearest")),
           ("Round {value} {direction}.", "Please round the number {value} {direction}.")),
    Family("book_hotel", "Book a hotel room.",
           (_text("city", CITIES), _date("arrival"), _int("nights", 1, 9),
            _enum("room", "single double suite", " in a {} room")),
           ("Book a hotel in {city} from {arrival} for {nights} nights{room}.",
            "I need {nights} nights in {city}{room}, arriving {arrival}.")),
    Family("book_table", "Reserve a table.",
           (_text("restaurant", COMPANIES), _int("guests", 2, 9), _time()),
           ("Reserve a table for {guests} at {restaurant} at {time}.",
            "Book {restaurant} for {guests} people, {time}.")),
    Family("book_train", "Book a train ticket.",
           (_nested("route", "from {origin} to {goal}", _text("origin", CITIES[:7]), _text("goal", CITIES[7:])),
            _date(), _enum("seat", "window aisle", ", {} seat")),
           ("Book a train {route} on {date}{seat}.", "I want to go {route} by train on {date}{seat}.")),
    Family("call_taxi", "Order a taxi.",
           (_ADDRESS, _int("passengers", 2, 6, 1, " for {} people")),
           ("Send a taxi to {address}{passengers}.", "I need a taxi at {address}{passengers}.")),
    Family("find_route", "Directions between two cities.",
           (_text("origin", CITIES[:7]), _text("destination", CITIES[7:]), _enum("mode", "car bike walk", " by {}")),
           ("How do I get from {origin} to {destination}{mode}?", "Route from {origin} to {destination}{mode}.")),
    Family("order_food", "Order food for delivery.",
           (_list(_nested("items", "{count} {food}", _int("count", 2, 12), _text("food", FOODS)), least=1, most=2),
            _ADDRESS),
           ("Order {items} to {address}.", "Deliver {items} to {address}, please.")),
    Family("add_to_list", "Add things to the shopping list.",
           (_list(_text("things", FOODS)),),
           ("Put {things} on the shopping list.", "Add {things} to my shopping list.")),
    Family("find_recipe", "Recipes with given ingredients.",
           (_list(_text("ingredients", FOODS)), _int("minutes", 15, 60, 5, " in at most {} minutes")),
           ("Find a recipe with {ingredients}{minutes}.", "What can I cook with {ingredients}{minutes}?")),
    Family("translate", "Translate a phrase.",
           (_text("phrase", PHRASES), _text("language", LANGUAGES)),
           ("Translate into {language}: {phrase}", "How do I say in {language}: {phrase}")),
    Family("set_light", "Change the light of a room.",
           (_text("room", ROOMS), _nested("light", "{brightness} percent, {colour}",
                                          _int("brightness", 10, 95, 5), _enum("colour", "red blue green white"))),
           ("Set the light in the {room} to {light}.", "Light in the {room}: {light}.")),
    Family("set_heating", "Set the temperature of a room.",
           (_text("room", ROOMS), _number("degrees", 16, 25), _time("until", " until {}")),
           ("Heat the {room} to {degrees} degrees{until}.", "Set the {room} to {degrees} degrees{until}.")),
    Family("play_song", "Play a song.",
           (_text("title", SONGS), _int("volume", 10, 90, 5, " at volume {}"), _flag("repeat", ", again and again")),
           ("Play {title}{volume}{repeat}.", "I want to hear {title}{volume}{repeat}.")),
    Family("stock_price", "Price of a share.",
           (_text("company", COMPANIES), _date("date", " on {}"), _text("currency", CURRENCIES, " in {}")),
           ("What did a share of {company} cost{date}{currency}?", "Price of {company}{date}{currency}, please.")),
    Family("pay_bill", "Transfer money.",
           (_text("to", COMPANIES), _int("amount", 10, 900), _text("currency", CURRENCIES), _date("due", " by {}")),
           ("Pay {amount} {currency} to {to}{due}.", "Transfer {amount} {currency} to {to}{due}.")),
    Family("track_parcel", "Where a parcel is.",
           (_int("number", 10000, 99999), _enum("carrier", "post courier freight", " sent by {}")),
           ("Where is the parcel {number}{carrier}?", "Track parcel {number}{carrier}.")),
    Family("convert_file", "Convert a file to another format.",
           (_text("file", FILES), _nested("output", "{format} of {quality} quality",
                                          _enum("format", "pdf html docx"), _enum("quality", "low medium high"))),
           ("Convert {file} to {output}.", "Make {file} into {output}.")),
    Family("plan_trip", "Plan a trip through several cities.",
           (_list(_text("cities", CITIES)), _nested("budget", "{amount} {currency}",
                                                    _int("amount", 300, 3000, 50), _text("currency", CURRENCIES))),
           ("Plan a trip to {cities} for {budget}.", "I have {budget} for a trip to {cities}.")),
)  # fmt: skip


def draw_request(family: Family, rng: np.random.Generator) -> DrawnRequest:
    """Draw a request of a family."""
    arguments: dict[str, Any] = {}
    words: dict[str, str] = {}
    for one in family.parameters:
        words[one.name] = ""
        if one.clause is None or rng.random() < 0.5:
            value = arguments[one.name] = one.draw(rng)
            words[one.name] = (one.clause or "{}").format(one.phrase(value))
    return DrawnRequest(family.function, _draw_one(rng, family.templates).format(**words), arguments)


def draw_requests(count: int, offered: int, seed: int) -> list[Request]:
    """Draw `count` requests, each with `offered` functions; every family is asked for before one is asked for again.

    An item depends only on the seed and its place.
    """
    order = np.random.default_rng([_REQUESTS, seed]).permutation(len(FAMILIES)).tolist()
    out = []
    for place in range(count):
        rng = np.random.default_rng([_REQUESTS, seed, place])
        asked = order[place % len(order)]
        others = [index for index in rng.permutation(len(FAMILIES)).tolist() if index != asked][: offered - 1]
        found = draw_request(FAMILIES[asked], rng)
        functions = [FAMILIES[index].function for index in others]
        functions.insert(int(rng.integers(offered)), found.function)
        name, allowed = f"{found.function.name} {place}", allow_values(found.arguments)
        out.append(Request(name, found.text, tuple(functions), found.function.name, allowed))
    return out


def draw_shots(count: int, request: Request, place: int, seed: int, shown: bool = False) -> list[DrawnRequest]:
    """Draw `count` answered requests of other functions than those that a request offers.

    Args:
        place: of the request.
        shown: one of them, at a drawn place, is another request for the function that is asked for.
    """
    rng = np.random.default_rng([_SHOTS, seed, place])
    offered = {function.name for function in request.functions}
    free = [FAMILIES[index] for index in rng.permutation(len(FAMILIES)).tolist() if FAMILIES[index].name not in offered]
    shots = [draw_request(family, rng) for family in free[: count - shown]]
    if shown:
        [asked] = [family for family in FAMILIES if family.name == request.function]
        other = draw_request(asked, rng)
        while other.text == request.text:
            other = draw_request(asked, rng)
        shots.insert(int(rng.integers(count)), other)
    return shots
