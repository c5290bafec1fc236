"""Relations of people, firms, towns, things and events: statements for documents, and questions."""

from __future__ import annotations

from training.tasks.relation import EVENT, FIRM, PERSON, SUBJECTS, THING, TOWN, Relation
from training.tasks.split import wordings

_TABLE = (
    Relation(
        "works_at",
        PERSON,
        FIRM,
        wordings(
            "{S} [works|has a job|is employed] [at|with] {V}",
            "{S} [earns a living|spends the working week] at {V}",
            "[The employer|The present employer] of {S} is {V}",
        ),
        wordings(
            "[At|For] which firm does {S} [work|have a job|earn a living]?",
            "[What|Which firm] is the [employer|place of work] of {S}?",
            "Which firm [employs {S}|has {S} as an employee]?",
        ),
        "{S} works at {V}.",
    ),
    Relation(
        "lives_in",
        PERSON,
        TOWN,
        wordings(
            "{S} [lives|has a house|rents a flat|keeps a home] in {V}",
            "[The home|The house] of {S} is in {V}",
            "{S} [moved to|settled in] {V} [years ago|last spring]",
        ),
        wordings(
            "In [which|what] town [does {S} live|does {S} have a house|does {S} keep a home|is the home of {S}]?",
            "Where [does {S} live|does {S} have a house|is the home of {S}]?",
        ),
        "{S} lives in {V}.",
    ),
    Relation(
        "born_on",
        PERSON,
        "date",
        wordings(
            "{S} [was born|came into the world] on {V}",
            "{O} [birthday|day of birth] [is|falls on] {V}",
            "[The birthday|The day of birth] of {S} [is|falls on] {V}",
        ),
        wordings(
            "[When|On which day] [was {S} born|did {S} come into the world]?",
            "[When|On which day] [is the birthday of {S}|is {O} birthday|does {O} birthday fall]?",
        ),
        "{S} was born on {V}.",
    ),
    Relation(
        "badge",
        PERSON,
        "code",
        wordings(
            "{S} [carries|wears|was given] [badge|the badge] {V}",
            "{O} badge [has the code|bears the code|is marked] {V}",
            "[The badge|The new badge] of {S} has the code {V}",
        ),
        wordings(
            "[What|Which] code [is on|stands on] {O} badge?",
            "[What|Which] code [does {O} badge have|does {O} badge bear]?",
            "[What|Which badge] [does {S} carry|does {S} wear|was {S} given]?",
        ),
        "{S} carries badge {V}.",
    ),
    Relation(
        "job",
        PERSON,
        "job",
        wordings(
            "{S} [is|works as|was trained as|became] a {V}",
            "{O} [job|trade|work] is that of a {V}",
            "[The job|The trade|The work] of {S} is that of a {V}",
        ),
        wordings(
            "What is [the job|the trade|the work] of {S}?",
            "What is {O} [job|trade|work]?",
            "What [does {S} do for a living|does {S} work as|was {S} trained as|did {S} become]?",
        ),
        "{S} is a {V}.",
    ),
    Relation(
        "extension",
        PERSON,
        "number",
        wordings(
            "{S} [answers calls|takes calls|can be called] [at|on] extension {V}",
            "{O} [extension|telephone extension] is {V}",
            "[The extension|The telephone extension] of {S} is {V}",
        ),
        wordings(
            "[What|Which] is [the extension|the telephone extension] of {S}?",
            "[What|Which] is {O} [extension|telephone extension]?",
            "[On|At] which extension [can {S} be called|does {S} take calls]?",
        ),
        "{O} extension is {V}.",
    ),
    Relation(
        "sister",
        PERSON,
        PERSON,
        wordings(
            "{O} [sister|only sister|younger sister|elder sister] is [called|named] {V}",
            "{S} has [a sister|one sister|a younger sister] [called|named] {V}",
        ),
        wordings(
            "[What is the name of|Who is] {O} [sister|only sister]?",
            "[What is the name of|Who is] the [sister|only sister] of {S}?",
            "What is {O} sister [called|named]?",
        ),
        "{O} sister is called {V}.",
    ),
    Relation(
        "owns",
        PERSON,
        THING,
        wordings(
            "{S} [owns|bought|inherited|is the owner of] {V}",
            "{S} [has owned|has been the owner of] {V} for [years|a long time]",
            "{S} [paid for|came to own] {V}",
        ),
        wordings(
            "[What|Which thing] does {S} own?",
            "[What|Which thing] [did {S} buy|did {S} inherit|is {S} the owner of|did {S} come to own]?",
        ),
        "{S} owns {V}.",
    ),
    Relation(
        "based_in",
        FIRM,
        TOWN,
        wordings(
            "{S} [is based|has its office|has its seat|rents an office] in {V}",
            "[The office|The main office|The seat] of {S} is in {V}",
            "{O} [office|main office|seat] is in {V}",
        ),
        wordings(
            "In [which|what] town [is {S} based|does {S} have its office|does {S} have its seat|is {O} office]?",
            "Where [is {S} based|is the office of {S}|is the seat of {S}]?",
        ),
        "{S} is based in {V}.",
    ),
    Relation(
        "makes",
        FIRM,
        "goods",
        wordings(
            "{S} [makes|sells|produces|is known for] {V}",
            "{S} [has always made|has always sold|makes and sells] {V}",
            "[The main goods|The goods] of {S} are {V}",
        ),
        wordings(
            "[What|What goods|Which goods] does {S} [make|sell|produce]?",
            "[What|What goods|Which goods] [is {S} known for]?",
        ),
        "{S} makes {V}.",
    ),
    Relation(
        "founded",
        FIRM,
        "year",
        wordings(
            "{S} [was founded|was set up|began|opened] in {V}",
            "{S} [began work|opened its doors] in [|the year ]{V}",
            "The [founding|opening] of {S} was in {V}",
        ),
        wordings(
            "[When|In which year] [was {S} founded|was {S} set up|did {S} begin|did {S} open]?",
            "[What|Which] year was {S} [founded|set up] in?",
        ),
        "{S} was founded in {V}.",
    ),
    Relation(
        "director",
        FIRM,
        PERSON,
        wordings(
            "{S} is [run|led|directed|managed] by {V}",
            "[The director|The head|The manager] of {S} is {V}",
            "{O} [director|head|manager] is {V}",
        ),
        wordings(
            "Who [runs|leads|directs|manages] {S}?",
            "Who is [the director|the head|the manager] of {S}?",
            "Who is {O} [director|head|manager]?",
        ),
        "{S} is run by {V}.",
    ),
    Relation(
        "river",
        TOWN,
        "river",
        wordings(
            "{S} [lies|stands|was built] [on|by] the river {V}",
            "The river {V} [runs|flows] [through|past] {S}",
        ),
        wordings(
            "[Which|What] river [runs through|flows through|runs past|flows past] {S}?",
            "[On|By] which river does {S} [lie|stand]?",
        ),
        "{S} lies on the river {V}.",
    ),
    Relation(
        "mayor",
        TOWN,
        PERSON,
        wordings(
            "[The mayor|The new mayor] of {S} is {V}",
            "{O} [mayor|new mayor] is {V}",
            "The people of {S} [chose|elected] {V} as [mayor|their mayor]",
            "{S} [has chosen|has elected] {V} as [mayor|its mayor]",
        ),
        wordings(
            "Who is [the mayor|the new mayor] of {S}?",
            "Who is {O} [mayor|new mayor]?",
            "Who [was chosen|was elected] as [the mayor|mayor] of {S}?",
            "Whom did {S} [choose|elect] as mayor?",
        ),
        "The mayor of {S} is {V}.",
    ),
    Relation(
        "fair",
        TOWN,
        "date",
        wordings(
            "{S} [holds|has] [its fair|its yearly fair] on {V}",
            "[The fair|The yearly fair] of {S} [is|falls] on {V}",
            "{O} [fair|yearly fair] [is|falls] on {V}",
        ),
        wordings(
            "[When|On which day] is {O} [fair|yearly fair]?",
            "[When|On which day] [does {S} hold its fair|does {S} have its yearly fair|is the fair of {S}]?",
            "On which day does [the fair|the yearly fair] of {S} fall?",
        ),
        "The fair of {S} is on {V}.",
    ),
    Relation(
        "post_code",
        TOWN,
        "number",
        wordings(
            "{S} [has|uses|was given] the [post code|postal code] {V}",
            "[The post code|The postal code] of {S} is {V}",
            "{O} [post code|postal code] is {V}",
        ),
        wordings(
            "[What|Which] is the [post code|postal code] of {S}?",
            "[What|Which] is {O} [post code|postal code]?",
            "[What|Which] [post code|postal code] does {S} [have|use]?",
        ),
        "The post code of {S} is {V}.",
    ),
    Relation(
        "kept_in",
        THING,
        "room",
        wordings(
            "{S} [is kept|stands|is stored|can be found] in {V}",
            "[The place|The usual place] of {S} is {V}",
            "[Visitors|Guests] [find|can find] {S} in {V}",
        ),
        wordings(
            "Where [is {S} kept|does {S} stand|is {S} stored|can {S} be found]?",
            "In [which|what] room [is {S} kept|is {S} stored|does {S} stand]?",
        ),
        "{S} is kept in {V}.",
    ),
    Relation(
        "serial",
        THING,
        "code",
        wordings(
            "{S} [has|bears|carries|is marked with] the [serial number|number] {V}",
            "[The serial number|The number] of {S} is {V}",
        ),
        wordings(
            "[What|Which] is [the serial number|the number] of {S}?",
            "[What|Which] [serial number|number] does {S} [have|bear|carry]?",
        ),
        "{S} has the serial number {V}.",
    ),
    Relation(
        "price",
        THING,
        "price",
        wordings(
            "{S} [costs|is worth|was sold for|sells for] {V}",
            "[The price|The last price] of {S} [is|was] {V}",
            "{O} price [is|was] {V}",
        ),
        wordings(
            "[What|How much] [does {S} cost|is {S} worth|was {S} sold for|does {S} sell for]?",
            "What [is|was] [the price|the last price] of {S}?",
        ),
        "{S} costs {V}.",
    ),
    Relation(
        "weight",
        THING,
        "weight",
        wordings(
            "{S} weighs [|about |almost |just over |just under ]{V}",
            "[The weight|The full weight] of {S} is [|about ]{V}",
            "{O} weight is [|about |almost ]{V}",
        ),
        wordings(
            "[How much|What] does {S} weigh[| in full]?",
            "[What|How much] is [the weight|the full weight] of {S}?",
            "[What|How much] is {O} [weight|full weight]?",
        ),
        "{S} weighs {V}.",
    ),
    Relation(
        "held_in",
        EVENT,
        TOWN,
        wordings(
            "{S} [is held|takes place|will be held|will take place] in {V}",
            "{S} [will come|is to come] to {V}[| this year]",
            "[The place|The town] of {S} is {V}",
        ),
        wordings(
            "In [which|what] town [is {S} held|does {S} take place|will {S} be held|will {S} take place]?",
            "Where [is {S} held|does {S} take place|will {S} be held]?",
        ),
        "{S} is held in {V}.",
    ),
    Relation(
        "starts_on",
        EVENT,
        "date",
        wordings(
            "{S} [begins|starts|opens|will begin|will start] on {V}",
            "[The day|The first day] of {S} is {V}",
            "{O} [first day|opening day|day] is {V}",
        ),
        wordings(
            "[When|On which day] does {S} [begin|start|open]?",
            "[When|What] is the [day|first day|opening day] of {S}?",
        ),
        "{S} begins on {V}.",
    ),
    Relation(
        "host",
        EVENT,
        PERSON,
        wordings(
            "{S} is [led|opened|hosted|planned] by {V}[| this year]",
            "[The host|The leader] of {S} is {V}",
            "{V} [leads|opens|hosts|plans] {S}[| this year]",
        ),
        wordings(
            "Who [leads|opens|hosts|plans] {S}[| this year]?",
            "Who is [the host|the leader] of {S}?",
            "By whom is {S} [led|opened|hosted|planned][| this year]?",
        ),
        "{S} is hosted by {V}.",
    ),
    Relation(
        "tickets",
        EVENT,
        "small",
        wordings(
            "{S} has [|sold ]{V} [tickets|seats]",
            "There are {V} [tickets|seats] for {S}",
            "[The number of tickets|The number of seats] for {S} is {V}",
            "{V} [tickets|seats] [were sold|were printed] for {S}",
        ),
        wordings(
            "How many [tickets|seats] [are there for {S}|does {S} have|were sold for {S}|were printed for {S}]?",
            "What is the number of [tickets|seats] for {S}?",
        ),
        "There are {V} tickets for {S}.",
    ),
)

RELATIONS = {relation.name: relation for relation in _TABLE}
SUBJECT_RELATIONS = {subject: tuple(r for r in _TABLE if r.subject == subject) for subject in SUBJECTS}
