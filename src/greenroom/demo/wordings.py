"""The ways a person asks for a digit: what the demo pipeline is trained on, and what is held out to test it.

Every wording is a template with one ``{digit}`` field, filled either with a numeral or with a number word
of the template's language. The held-out templates never take part in training, and neither do many of their
words: how well they are drawn says whether the pipeline understands a wording or only remembers it.
"""

from __future__ import annotations

DIGIT_WORDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "en": (
        ("zero", "nought"),
        ("one",),
        ("two",),
        ("three",),
        ("four",),
        ("five",),
        ("six",),
        ("seven",),
        ("eight",),
        ("nine",),
    ),
    "de": (
        ("null",),
        ("eins",),
        ("zwei",),
        ("drei",),
        ("vier",),
        ("fünf",),
        ("sechs",),
        ("sieben",),
        ("acht",),
        ("neun",),
    ),
    # "un" is the article of nearly every French sentence here, so a French one is always written as a
    # numeral.
    "fr": (
        ("zéro",),
        (),
        ("deux",),
        ("trois",),
        ("quatre",),
        ("cinq",),
        ("six",),
        ("sept",),
        ("huit",),
        ("neuf",),
    ),
    "es": (
        ("cero",),
        ("uno",),
        ("dos",),
        ("tres",),
        ("cuatro",),
        ("cinco",),
        ("seis",),
        ("siete",),
        ("ocho",),
        ("nueve",),
    ),
}

SEEN: dict[str, tuple[str, ...]] = {
    "en": (
        "{digit}",
        "a {digit}",
        "the {digit}",
        "number {digit}",
        "digit {digit}",
        "a handwritten {digit}",
        "handwritten {digit}",
        "a hand-written {digit}",
        "the digit {digit}",
        "the number {digit}",
        "the digit {digit}, handwritten",
        "the number {digit}, written by hand",
        "draw {digit}",
        "draw a {digit}",
        "draw me a {digit}",
        "please draw me a {digit}",
        "please draw a {digit}",
        "write a {digit}",
        "write the number {digit}",
        "please write the digit {digit} for me",
        "can you draw a {digit}?",
        "could you draw the number {digit}, please?",
        "i want a {digit}",
        "i would like a handwritten {digit}",
        "i need a picture of a {digit}",
        "show me a {digit}",
        "show me the digit {digit}",
        "give me a {digit}",
        "a picture of a {digit}",
        "a picture of the number {digit}",
        "an image of a handwritten {digit}",
        "a photo of the digit {digit}",
        "a drawing of a {digit}",
        "a black {digit} on white paper",
        "{digit} in black ink",
        "a {digit} in ink",
        "a {digit} drawn with a pen",
        "a bold {digit}",
        "one handwritten {digit}",
        "a nice {digit}",
        "a big {digit} in the middle",
        "paint a {digit} for me",
        "generate a {digit}",
        "generate an image of the digit {digit}",
        "make a {digit}",
        "create a handwritten digit {digit}",
        "hello, draw a {digit} for me",
        "my favourite number is {digit}",
        "{digit}, please",
        "{digit} as a handwritten digit",
        "{digit} written on paper",
        "the figure {digit}",
        "let me see a {digit}",
        "how does a {digit} look?",
        "what does the number {digit} look like?",
    ),
    "de": (
        "{digit}",
        "eine {digit}",
        "eine handgeschriebene {digit}",
        "die ziffer {digit}",
        "die zahl {digit}",
        "die ziffer {digit}, handgeschrieben",
        "zeichne eine {digit}",
        "bitte zeichne mir eine {digit}",
        "bitte male eine {digit}",
        "schreibe die zahl {digit}",
        "ich möchte eine {digit}",
        "zeig mir eine {digit}",
        "ein bild von einer {digit}",
        "eine schwarze {digit} auf weißem papier",
    ),
    "fr": (
        "{digit}",
        "un {digit}",
        "un {digit} manuscrit",
        "un {digit} écrit à la main",
        "le chiffre {digit}",
        "le nombre {digit}",
        "le chiffre {digit}, écrit à la main",
        "dessine un {digit}",
        "dessine-moi un {digit}",
        "dessine le chiffre {digit} s'il te plaît",
        "écris le chiffre {digit}",
        "je voudrais un {digit}",
        "montre-moi un {digit}",
        "une image du chiffre {digit}",
    ),
    "es": (
        "{digit}",
        "un {digit}",
        "un {digit} escrito a mano",
        "el número {digit}",
        "el dígito {digit}",
        "el dígito {digit}, escrito a mano",
        "dibuja un {digit}",
        "dibújame un {digit}",
        "por favor, dibuja un {digit}",
        "escribe el número {digit}",
        "quiero un {digit}",
        "muéstrame un {digit}",
        "una imagen del número {digit}",
        "un {digit} negro sobre papel blanco",
    ),
}

HELD_OUT: dict[str, tuple[str, ...]] = {
    "en": (
        "sketch the numeral {digit}",
        "would you kindly scribble a {digit}?",
        "a {digit}, as scrawled by a child",
        "a scan of somebody's {digit}",
        "an inky {digit} from an old letter",
        "my house number: {digit}",
        "room {digit}",
        "how about a lovely {digit}",
        "a portrait of {digit}",
        "the handwriting of a person writing {digit}",
        "doodle of a {digit}",
        "I'd love to look at a {digit} today",
        "surprise me with your best {digit}!",
        "render {digit} with a thick marker",
        "jot down a quick {digit}",
        "{digit}: calligraphy, monochrome",
        "a postal code digit, namely {digit}",
        "a neat little {digit} on a blank page",
        "imagine a {digit} on a school blackboard",
        "produce exactly a {digit}",
        "Draw the numeral {digit} the way a teacher would",
        "grandmother wrote down a {digit}",
    ),
    "de": (
        "kritzle mir bitte schnell eine {digit}",
        "skizziere eine große {digit}",
        "hausnummer {digit}",
        "wie sieht eine {digit} aus?",
        "eine krakelige {digit} mit tinte",
    ),
    "fr": (
        "trace le chiffre {digit} à l'encre",
        "peux-tu griffonner un {digit} ?",
        "un joli {digit} noir",
        "chambre numéro {digit}",
        "à quoi ressemble un {digit} ?",
    ),
    "es": (
        "garabatea un {digit} con tinta",
        "¿me haces un {digit} bonito?",
        "habitación número {digit}",
        "un {digit} trazado por un niño",
        "cómo se ve un {digit}",
    ),
}

# Ten English wordings, the last five of them held out; the mixed case is part of the exercise.
PROMPTS: tuple[str, ...] = (
    "a handwritten {digit}",
    "{digit}",
    "Please draw me a {digit}",
    "the digit {digit}, handwritten",
    "A PICTURE OF THE NUMBER {digit}",
    "Would you kindly scribble a {digit}?",
    "sketch the numeral {digit}",
    "An INKY {digit} from an old letter",
    "surprise me with your best {digit}!",
    "my house number: {digit}",
)


def spell(digit: int, language: str = "en") -> str:
    """The first number word of ``digit`` (0 to 9) in ``language``; the numeral where the language has none here.

    Raises ValueError for another digit or language.
    """
    if digit not in range(10):
        raise ValueError(f"digit: got {digit!r}, accepted are 0 to 9")
    if language not in DIGIT_WORDS:
        raise ValueError(f"language: got {language!r}, accepted are {', '.join(DIGIT_WORDS)}")
    words = DIGIT_WORDS[language][digit]
    return words[0] if words else str(digit)
