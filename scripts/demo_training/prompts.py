"""Endless prompts for a digit: templates, scrambled templates, and word soups in which only the digit means anything.

The soups are what makes unseen wordings work: the encoders learn to find the digit among words they do not
know.
"""

from __future__ import annotations

import random
import re

from transformers import T5Tokenizer

from greenroom.demo.wordings import DIGIT_WORDS, HELD_OUT, SEEN

LANGUAGES = ("en", "de", "fr", "es")
LANGUAGE_WEIGHTS = (0.64, 0.12, 0.12, 0.12)

_COMMON = """
about above across add after again against air all almost along also always am among and angry animal
another any anyone anything apart are area arm around art artist as ask at away baby back bad bag ball bank
bar base be beach beautiful because bed been before begin behind being below best better between beyond bird
bit black blue board boat body book born both bottom box boy bread break bright bring brother brown build
business busy but buy by call came camera can car card care carefully carry case cat catch chair change
charcoal cheap check child city clean clear clearly climb clock close cloud coat cold color colour come cook
cool corner could country course cover crayon cut dad dark day dear deep design did different dinner do
doctor does dog door down draft dress drink drive dry each ear early earth easy eat edge else email end
engine enough even evening ever every everyone eye face fact fall family far fast father feel few field fill
film final find fine finger fire first fish fit floor flower fly follow food foot for forest form free fresh
friend from front full fun funny game garden get girl glass go gold good got great green grey ground group
grow had hair half hand happy hard has hat have he head hear heart heavy help her here hi high him his hold
home hope horse hot hour house huge idea if in inside into is it its job join jump just keep kind kitchen
know lady lake land large last late later laugh lead leaf learn leave left leg less let letter light like
line list little live long look lot loud love low lucky lunch machine made mail main man many map mark
market may maybe mean meet middle might milk mine minute model moment money monday month moon more morning
most mother mountain mouth move much mum music must my name narrow near neck need never new next night no
noise none normal north nose not note nothing now of off office often oh ok okay old on once only open or
orange order other our out over own page pain pair paper park part party pass past pay pencil people perhaps
phone piece pink place plain plan plane plant play please point poor post power pretty price print problem
pull purple push put question quiet quite rain rather read ready real really red rest rich ride right ring
river road rock roof round row rule run sad safe said salt same sand save saw say school sea seat second see
seem sell send sentence set shape sharp she ship shirt shoe shop short should show side sign silver simple
since sing single sir sister sit size skin sky sleep slow slowly small smile smooth snow so soft some
someone something sometimes song soon sort sound soup south space speak special spell spring square stand
star start station stay step still stone stop story straight strange street strong student style such sugar
summer sun sure sweet swim table take talk tall tea teach team tell test text than thank thanks that their
them then there these they thin thing think this those though time tiny to today together tomorrow tonight
too top touch town train tree trip true try turn type under until up upon us use useful usual very view
visit voice wait walk wall want warm was wash watch water way we wear week well went were west wet what when
where which while white who whole why wide wife wild will win wind window winter wish with without woman
wonderful wood word work world would write wrong yard year yellow yes yesterday yet you young your alles
aber auch auf aus bei bin bitte das dem den der des dich dir doch du ein einen einer er es etwas für ganz
gern groß gut haben hallo heute hier ich ihr im ist ja jetzt kann kleine können mal man mehr mein mich mit
nach nein nicht noch nur oder schön sehr sein sie sind so über und uns vielleicht von war was wenn wie wir
wo zu zum avec aussi beau bien bonjour ce cela celui cette comme dans de des du elle en encore est et être
faire grand il ils jamais je joli la les leur lui mais merci mes moi mon ne noir nous on ou oui par pas
petit peu plus pour quand que qui sa sans se ses si son sous sur toi ton tout très tu veux voici vous al
algo amigo aquí así bien blanco bueno como con cosa cuando de del donde el ella en es ese eso esta este
favor gracias grande gusto hay hola hoy la las lo los más me mi muy nada ni no nos o para pequeño pero poco
por porque puede que quien se ser si sin sobre su también te tengo tu un una y ya yo
"""


def words(text: str) -> list[str]:
    """The lower-case words of a text."""
    return re.findall(r"[^\W\d_]+", text.lower())


DIGIT_NAMES = {word for table in DIGIT_WORDS.values() for names in table for word in names}
SEEN_WORDS = {word for table in SEEN.values() for text in table for word in words(text)} - {"digit"}
_HELD_OUT_WORDS = {word for table in HELD_OUT.values() for text in table for word in words(text)}
# Words that only the held-out wordings use stay unseen, or they would be held out in name only. A bare "un"
# or "une" in a soup would be a French one.
FILLERS: list[str] = sorted(set(_COMMON.split()) - (_HELD_OUT_WORDS - SEEN_WORDS) - DIGIT_NAMES - {"un", "une", "once"})
VOCABULARY: list[str] = sorted(DIGIT_NAMES | SEEN_WORDS | {"digit"} | set(FILLERS))

_CONSONANTS, _VOWELS = "bcdfghjklmnprstvwz", "aeiou"


class PromptWriter:
    """Writes random prompts for a digit, repeatably from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def write(self, digit: int) -> str:
        pick = self._random
        language = pick.choices(LANGUAGES, LANGUAGE_WEIGHTS)[0]
        name = self._name(digit, language)
        kind = pick.random()
        if kind < 0.08:
            text = name
        elif kind < 0.5:
            text = pick.choice(SEEN[language]).format(digit=name)
        elif kind < 0.72:
            text = self._scrambled(pick.choice(SEEN[language]), name)
        else:
            text = self._soup(name)
        if pick.random() < 0.3:
            text += pick.choice(".!?:")
        if pick.random() < 0.05:
            text = pick.choice(('"{}"', "'{}'", "({})")).format(text)
        case = pick.random()
        if case < 0.2:
            return text[:1].upper() + text[1:]
        if case < 0.3:
            return text.upper()
        return text

    def write_fitting(self, tokenizer: T5Tokenizer, length: int, digit: int) -> str:
        """A prompt of at most ``length`` tokens (truncated, it might lose its digit); "" for any digit above 9."""
        while digit < 10:
            prompt = self.write(digit)
            if len(tokenizer(prompt).input_ids) <= length:
                return prompt
        return ""

    def _name(self, digit: int, language: str) -> str:
        names = DIGIT_WORDS[language][digit]
        return str(digit) if not names or self._random.random() < 0.35 else self._random.choice(names)

    def _scrambled(self, template: str, name: str) -> str:
        """A template with words dropped, words put in, and something said before or after."""
        pick = self._random
        kept = [word for word in template.split() if "{digit}" in word or pick.random() > 0.25]
        for _ in range(pick.randint(0, 3)):
            kept.insert(pick.randint(0, len(kept)), self._word())
        return " ".join(kept).format(digit=name)

    def _soup(self, name: str) -> str:
        pick = self._random
        soup = [self._word() for _ in range(pick.randint(1, 10))]
        soup.insert(pick.randint(0, len(soup)), name)
        return " ".join(soup)

    def _word(self) -> str:
        """A common word, or one that nobody knows: at run time most unknown words look like this."""
        pick = self._random
        if pick.random() < 0.75:
            return pick.choice(FILLERS)
        syllables = pick.randint(1, 3)
        word = "".join(pick.choice(_CONSONANTS) + pick.choice(_VOWELS) for _ in range(syllables))
        word += pick.choice(("", "", "n", "s", "ck", "r", "ng"))
        return self._word() if word in DIGIT_NAMES else word
