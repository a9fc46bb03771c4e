"""Word lists for the skills of the demo model."""

from __future__ import annotations

COMMON = tuple(
    """
    able about above across after again air all almost alone along also always animal answer apple area arm
    autumn away baby back bag ball bank basket beach bear beautiful bed bell better bird black blue board boat
    body book bottle bottom box branch bread breakfast bridge bright bring brother brown build business butter
    button cake camera camp candle captain card carry castle cat chair chance change cheap chicken child
    circle city class clean clear climb clock cloud coat coffee cold color computer cook copper corner cotton
    country course cousin cover cream cross crowd crown dance danger dark daughter deep desert desk dinner
    doctor dog dollar door double dream dress drink drive dry duck dust early earth east easy effect egg empty
    engine enough evening example eye face factory family famous farm father feather feeling field finger fire
    fish flag flame floor flower forest forget fork free fresh friend fruit funny garden gentle giant girl
    glass gold good grass gray great green ground guitar hair hammer hand happy harbor hat health heart heavy
    hello help hill holiday honey horse hospital hotel house hundred hungry ice idea island jacket jelly
    journey juice jump jungle kettle key kind king kitchen knee knife ladder lake lamp language laugh leaf
    learn leather lemon letter library light lion little lock long machine market master meadow meal measure
    meat memory message metal middle milk mill minute mirror model money monkey month moon morning mother
    mountain mouse mouth movie music nation nature needle neighbor nest never night noise north number ocean
    office onion open orange order oven owner page paint palace paper parcel party peace pencil people pepper
    picture pilot planet plant plate pocket poem point pony potato power present pretty price problem purple
    python question quick quiet rabbit race radio rain reason red rice river road rocket roof room rose router
    sail salt sand school science sea season second secret seed server shadow sheep ship shirt shop shoulder
    silver simple sister sky sleep small smile snow soap soft song soup south spoon spring square stage star
    station stone storm story street strong student sugar summer sun sweet table teacher thank thunder ticket
    tiger timber time token tomato tower town train travel tree truth turtle umbrella uncle valley vapor
    velvet village violin voice wagon walk wall warm watch water wave weather week west wheel white wide wind
    window winter winner wire wolf wonder wood word work world write yellow young zebra zero
    batch block cache decode launcher millrace prefill prompt queue sequence shard stream
    """.split()  # noqa: SIM905
)

NAMES = tuple(
    """
    Ada Alan Alice Anna Ben Bob Carl Carol Clara Dan Dora Edgar Ella Emma Eva Finn Frank Grace Hanna Hugo Ida
    Ivan Jack Jane John Julia Karl Kate Ken Lara Leo Linda Lisa Luis Mara Maria Mark Max Mia Mike Nina Noah
    Olga Oscar Paul Peter Rosa Ruth Sam Sara Sofia Tim Tom Vera Victor Wanda Will Zoe
    """.split()  # noqa: SIM905
)

CITIES = tuple(
    """
    Athens Bergen Berlin Boston Cairo Delhi Dublin Lima Lisbon London Madrid Oslo Ottawa Paris Prague Rome Tokyo
    Vienna Warsaw Zurich
    """.split()  # noqa: SIM905
)

THINGS = (
    "apple", "book", "boat", "cat", "chair", "clock", "dog", "door", "fish", "flower", "house",
    "key", "lamp", "mill", "model", "moon", "router", "server", "shard", "ship", "star", "stone",
    "table", "token", "tree", "wheel",
)  # fmt: skip

COLORS = ("red", "blue", "green", "black", "white", "yellow", "brown", "orange", "purple", "gray")
