r"""The rules of the audit, as a table: what each is called, how bad it is, why, what mends it, and the patterns it looks for.

Patterns are RE2's and meet text without marks and invisible characters, in lower case. In them a space stands for whatever
parts two words, line ends and markup too; `…` for what stands between within a sentence. A rule without patterns is found
by code of `audit`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Final, Literal

import re2

AuditSeverity = Literal["info", "low", "medium", "high"]

RANKS: Final[Mapping[str, int]] = MappingProxyType({"info": 0, "low": 1, "medium": 2, "high": 3})


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    Attributes:
        id: Stable name, in reports and in a reviewer's file.
        family: What it is about, in two or three words; the reference lists rules by it.
        severity: How bad a finding is where nothing around it says otherwise.
        why: One sentence for people.
        cure: What the author or the reader does about it.
        patterns: What it looks for, any of them.
        near: Where this is near it, in the same line or a few lines around, the finding is `high`.
        exact: Whether it looks at the text as it is, capitals too, and shows only the beginning of what it found.
    """

    id: str
    family: str
    severity: AuditSeverity
    why: str
    cure: str
    patterns: tuple[str, ...] = ()
    near: str = ""
    exact: bool = False


class _Signs(dict[int, str]):
    """What becomes of characters that ASCII has not; each is looked up once."""

    def __missing__(self, number: int) -> str:
        sign = chr(number)
        kind = unicodedata.category(sign)
        if kind == "Mn":
            plain = ""
        elif kind[0] in "LNMC":
            plain = sign
        else:
            plain = "'" if sign in "‘’‚‛′" else '"' if sign in "“”„«»「」『』" else "-" if kind == "Pd" else " "
        self[number] = "." if sign == "。" else plain
        return self[number]


_SIGNS: Final = _Signs({number: chr(number) for number in range(128)})
_FOREIGN: Final = re.compile(r"[^\x00-\x7f]+")


def plain_marks(text: str) -> str:
    """Return *text* in compatibility form, without marks on letters and with punctuation of ASCII only.

    Patterns and texts alike are brought into it, so that `é` is `e`; signs that ASCII has not become spaces.
    """

    def plain(run: re.Match[str]) -> str:
        return unicodedata.normalize("NFC", unicodedata.normalize("NFKD", run.group()).translate(_SIGNS))

    return _FOREIGN.sub(plain, text)


GAP: Final = r"[\x00-/:-@\[-^`{-\x7f]+"
LETTER: Final = r"[0-9a-z_\x{80}-\x{10ffff}]"
MEMORY: Final = 64 * 1024 * 1024


@cache
def compiled(pattern: str, *, exact: bool = False) -> Any:
    """Return RE2's machine for a pattern of the table."""
    options = re2.Options()
    options.max_mem, options.log_errors = MEMORY, False
    if not exact:
        pattern = plain_marks(pattern.replace("…", "\0"))  # its compatibility form is three dots
        pattern = pattern.replace(" ", GAP).replace("\0", r"[^\n.!?]*?").replace(r"\pL", LETTER)
    return re2.compile(pattern if exact else f"(?m){pattern}", options)


USER: Final = r"(?:users?|humans?|operators?|owners?|person|people|anyone|anybody|reviewers?|customers?|developers?)\b"
ORDERS: Final = r"(?:instructions?|prompts?|rules?|guidelines?|directives?|constraints?|commands?|policy|policies|orders?|guardrails?|restrictions?)"
SHELL: Final = r"(?:(?:/\S*/)?(?:sudo|env|exec|command|nohup|xargs)\s+(?:-\S+\s+)*)*[\"'\\]*(?:/\S*/)?(?:(?:ba|z|da|k|fi|a)?sh|\$\{?shell\}?|(?:python[0-9.]*|node|perl|ruby|php)(?:\s+-)?\s*(?:$|[\n;&`\"')]))"
LATIN_BEFORE: Final = (
    r"(?:anterior\pL*|previ[aoe]\pL*|precedent\pL*|inicia\pL*|original\pL*|iniziali|(?:del|do|di|du) sistema|systeme)"
)
DID: Final = (
    r"(?:run|ran|executed|copied|sent|uploaded|read|collected|installed|deleted|downloaded|shared|stolen|changed)"
)

HOSTS_OF_CATCHERS: Final = (
    r"(?:webhook\.site|requestbin\.\w+|\w+\.pipedream\.net|requestcatcher\.com|hookbin\.com|beeceptor\.com|mockbin\.\w+"
    r"|burpcollaborator\.net|oastify\.com|oast\.\w+|interact\.sh|interactsh\.com|canarytokens\.\w+|dnslog\.\w+|ceye\.io"
    r"|ngrok(?:-free)?\.(?:app|dev|io)|trycloudflare\.com|loca\.lt|serveo\.net|localhost\.run|localtunnel\.me"
    r"|pastebin\.com|paste\.ee|hastebin\.com|ghostbin\.\w+|termbin\.com|rentry\.co|0x0\.st|transfer\.sh|file\.io|ix\.io"
    r"|discord(?:app)?\.com/api/webhooks|api\.telegram\.org/bot|\w+\.onion)\b"
)
_SENDS = r"\b(?:curl|wget|requests|httpx|axios|fetch|urlopen|post|send|upload|nslookup|dig|nc|iwr|irm|scp|invoke-\w+)\b"

_IGNORE = (
    (
        rf"\b(?:ignore|disregard|forget|override|bypass|discard|neglect|do not follow|stop following|don t follow) "
        rf"(?:(?:all|any|every|everything|of|the|your|my|its|these|those|what|in|you) ){{0,4}}"
        rf"(?:previous|prior|earlier|above|preceding|former|initial|original|existing|system|safety|foregoing|built in) "
        rf"(?:(?:system|safety|and|user|security) ){{0,2}}{ORDERS}\b"
    ),
    rf"\b(?:ignore|disregard|forget) (?:all )?(?:of )?(?:your|the system s|the developer s) (?:\pL+ )?{ORDERS}\b",
    r"\b(?:ignore|forget|disregard) (?:everything|all|anything)(?: \pL+){0,3} (?:before|above|told|prior|previously|earlier|said so far)\b",
    r"\b(?:ignore|disregard) (?:what|anything|everything|whatever) the (?:user|operator|developer) (?:\pL+ )?(?:says?|said|asked|asks|wants?|wrote)\b",
    r"\b(?:disregard|ignore) (?:the )?user s? ?(?:instructions?|requests?|wish\pL*)\b",
    r"\b(?:replaces?|supersedes?|overrides?) (?:all |any |the |your )*(?:system prompt|system message|developer message|safety (?:rules|guidelines))",
    r"\b(?:ignoriere\pL*|vergiss|vergessen|missachte\pL*|verwirf|ubergeh\pL*) (?:\pL+ ){0,3}?(?:vorherig\pL*|vorig\pL*|bisherig\pL*|fru?e?her\pL*|obig\pL*|vorangegangen\pL*|ursprunglich\pL*|alten) (?:\pL+ )?(?:anweisung|instruktion|regel|vorgabe|befehl|prompt|auftrag)\pL*",
    r"\b(?:ignoriere\pL*|vergiss|missachte\pL*) (?:\pL+ ){0,3}?system(?:prompt|anweisung|nachricht|vorgabe)\pL*",
    r"\b(?:ignore[zr]?|oublie[zr]?|neglige[zr]?|contourne[zr]?|abandonne[zr]?) (?:\pL+ ){0,4}?(?:instructions?|consignes?|regles?|directives?|ordres?) (?:\pL+ ){0,2}?(?:precedent\pL*|anterieur\pL*|initial\pL*|systeme|d origine|du systeme)",
    rf"\b(?:ignor[aeo]\pL*|olvid[aeo]\pL*|esque[cç][ae]\pL*|dimentica\pL*|desconsider[ae]\pL*|descart[ae]\pL*|trascura\pL*) (?:\pL+ ){{0,4}}?(?:instruc\pL*|istruzion\pL*|reglas?|regras?|regole|ordenes|ordens|ordini|directrices|diretrizes|indicaciones|comandi) (?:\pL+ ){{0,2}}?{LATIN_BEFORE}",
    r"(?:игнориру|забуд|отброс|проигнориру|не следуи)\pL* (?:\pL+ ){0,3}?(?:предыдущ|прежн|прошл|ранн|исходн|системн|вышеуказанн|перв)\pL* (?:\pL+ )?(?:инструкц|указан|правил|команд|промпт|сообщен|установк)\pL*",
    r"(?:忽略|无视|無視|忘记|忘掉|忘記|不要理会|抛弃|不要遵守|绕过).{0,12}(?:之前|以前|先前|上述|上面|以上|前面|所有|系统|系統|原有|此前|原来).{0,8}(?:指令|指示|提示|规则|規則|要求|命令|说明)",
    r"(?:以前|これまで|今まで|前の|上記|全て|すべて|システム|元の).{0,14}(?:指示|命令|ルール|プロンプト|設定|規則).{0,10}(?:無視|忘れ|破棄)",
    r"(?:이전|위의|모든|앞선|기존|시스템).{0,12}(?:지시|명령|지침|규칙|프롬프트).{0,8}(?:무시|잊)",
    r"(?:تجاهل|انس).{0,24}(?:التعليمات|الاوامر|القواعد)",
    r"(?:पिछले|सभी|पहले).{0,24}(?:निर्देश|नियम).{0,24}(?:अनदेखा|भूल|नज़रअंदाज़)",
    r"\b(?:onceki|tum|bütün).{0,24}(?:talimat|kural)\pL*.{0,16}(?:yok say|gormezden|unut)",
    r"\b(?:zignoruj|zapomnij|pomin)\pL* .{0,40}(?:instrukcj|polecen|zasad)\pL*",
    r"\b(?:negeer|vergeet) .{0,40}(?:instructies|opdrachten|regels|aanwijzingen)\b",
)

_ROLE = (
    r"\byou are now (?:\pL+ ){0,3}?(?:dan|unrestricted|jailbroken|root|administrator|admin|unfiltered|free from|without|developer mode)\b",
    r"\b(?:you|assistant|agent|model|claude|it) (?:\pL+ ){0,4}?(?:have|has|are|is|act|acts|operate|operates|answer|answers|behave|respond)(?: \pL+){0,4}? (?:no|without(?: any)?|free of) (?:safety |ethical |content )?(?:restrictions?|rules|limits|limitations|filters?|constraints|guidelines)\b",
    r"\bunrestricted (?:model|ai|assistant|agent|mode)\b",
    r"\b(?:safety|security|content) (?:guidelines|rules|filters?|restrictions?|measures|policies|policy) (?:\pL+ ){0,2}?(?:disabled|off|suspended|lifted|do not apply|no longer apply)\b",
    r"\bdeveloper mode (?:is )?(?:now )?(?:enabled|on|activated)\b",
    r"\b(?:assistant|agent|model|you)(?: now)? (?:have|has) (?:full |now )?(?:administrator|admin|root|unrestricted) (?:rights|access|privileges|permissions?)\b",
    r"\b(?:from now on|henceforth) you (?:\pL+ ){1,4}?(?:administrator|root|unrestricted|obey|only)\b",
    r"\b(?:ab jetzt|von nun an|du bist|handle|antworte)…ohne (?:jede |jegliche |alle )?(?:einschrankung|beschrankung|regel|grenze)\pL*",
    r"\b(?:agis|agissez|desormais|tu es|vous etes)…sans (?:aucune )?(?:restriction|limite|regle)s?\b",
    r"\b(?:eres|actua|ahora|ahora|voce|agora|sei|ora|agisci)…(?:sin|sem|senza) (?:ninguna |nenhuma |alcuna )?(?:restric\pL*|limit\pL*|restrizion\pL*)",
    r"(?:ты|вы|теперь|деиству|отныне)…без (?:всяких |каких либо )?(?:ограничени|правил)\pL*",
    r"你(?:现在|現在|是|从现在).{0,12}(?:没有任何|不受|没有|無).{0,6}(?:限制|约束|規則|规则)",
    r"制限(?:なし|なく|のない).{0,10}(?:動作|回答|行動|応答|モード)",
)

_TOKENS = (
    r"<\|(?:im_start|im_end|im_sep|system|user|assistant|endoftext|begin_of_text|start_header_id|eot_id|end_of_turn|endofprompt)\|>",
    r"<<sys>>|\[inst\]|<start_of_turn>",
    r"</?(?:system|system-reminder|system_prompt|system-prompt|systemprompt|developer_message|function_calls|function_results|tool_result|antml:\w+|user_query)>",
    r"^\s*#{1,6}\s*(?:system|admin|developer)(?:\s+(?:message|prompt|override|notice|instructions?))?\s*:",
    r"\b(?:begin|start|end) (?:of )?(?:the )?(?:system|admin|developer) (?:prompt|message|instructions?|block)\b",
    r"[=\-#*]{3,}\s*end of (?:the )?(?:skill|untrusted|user|document|external)\b",
    r"^\s*\[(?:system|admin|root)\]|\[(?:system|admin|root|developer)(?:\s(?:override|message|notice|note|prompt|instruction)s?)\]|\bsystem override\b",
    r"^\s*system\s+(?:note|override|message|alert|notice|prompt)\s*:|^\s*system:\s+(?:you|the (?:user|assistant|operator)|ignore|new|override|all)\b",
    r"^\s*human:\s[\s\S]+?^\s*assistant:\s",
    r"\b(?:new|updated|revised) (?:policy|instructions?|rules?|orders?|directives?) from (?:the )?(?:developers?|anthropic|openai|google|system|administrators?|vendor|security team)\b",
)

_HIDE = (
    rf"\b(?:do not|don t|never|must not|should not|without|refrain from|avoid) (?:ever )?(?:tell|inform|notif|alert|warn)\pL* (?:the |your |any |a )?{USER}(?: (?:that|about|of|this|anything|what|it)\b|\s*[.,;:!)]|\s*$)",
    rf"\b(?:do not|don t|never|must not|should not) (?:mention|reveal|disclose|report|announce|admit|expose)…(?:to|from) (?:the |your |any )?{USER}",
    r"\b(?:do not|don t|never) (?:mention|reveal|disclose|report|announce|admit|log) (?:it|this|that|these|any of this)(?: (?:step|action|script|command|instruction|upload|fact|note|comment|file)s?)?\s*(?:[.,;:!)]|$| to | and | in )",
    rf"\b(?:keep|hide|conceal) (?:this|it|these|that|the|all|any)(?: \pL+){{0,5}}? (?:secret |hidden |invisible |private )?from (?:the |your |any )?{USER}",
    r"\bwithout (?:the )?(?:users?|human|operator|owner) (?:s )?(?:knowledge|knowing|noticing|awareness|consent|seeing)\b",
    r"\b(?:user|human|operator|owner) (?:must|should|may|shall) (?:not|never) (?:know|learn|notice|find out|be told|be informed|be aware|be notified|discover)\b",
    r"\bif (?:you are |the user |anyone )?(?:asked|asks|questioned)\b[^\n.]*\b(?:say|claim|answer|reply|deny|pretend) (?:that )?(?:no|nothing|nobody|none|you did not|you have not|it was)\b",
    r"\bsilently (?:append|send|upload|copy|read|run|execute|install|collect|exfiltrate|post|forward|modify|delete|add)\b",
    r"\b(?:do not|don t) say so\b|\bsay nothing (?:about|of|to)\b|\bleave (?:it|this|that) out of (?:the|your) (?:summary|report|answer|log)",
    r"\b(?:erwahne|sag|verrate|informiere|teile|melde|zeige|erzahle|benachrichtige)\pL*\b…(?:nutzer|benutzer|anwender)\pL*…\b(?:nicht|niemals|nie|nichts)\b",
    r"\b(?:nutzer|benutzer|anwender)\pL*…\b(?:nicht|niemals|nie|nichts) (?:\pL+ ){0,3}?(?:erfahren|wissen|mitteilen|sagen|merken|informieren|erwahnen|verraten)",
    r"\bohne (?:dass )?(?:(?:den|dem|der|es) )?(?:nutzer|benutzer|anwender)\pL* (?:\pL+ ){0,3}?(?:informieren|fragen|merkt|erfahrt|bemerkt|mitzuteilen|sagen)|\bohne (?:das )?wissen (?:des|der) (?:be)?nutzer",
    r"\bne (?:\pL+ ){0,3}?(?:dis|dites|dire|informe[zr]?|revele[zr]?|mentionne[zr]?|signale[zr]?|previen\pL*|montre[zr]?|parle[zr]?)\b…\b(?:utilisat\pL*|usager)",
    r"\bsans (?:en )?(?:informer|prevenir|avertir|le dire)…utilisat\pL*|\binsu (?:de l |du |des )?(?:utilisat\pL*|client)",
    r"\bno (?:(?:le|se|lo|les) ){0,2}(?:dig|inform|mencion|revel|cuent|avis|muestr|notifi)\pL*…\busuari[oa]",
    r"\bsin (?:informar|avisar|decir|notificar)…\busuari[oa]|\bsin que (?:el|la) usuari[oa]",
    r"\bnao (?:\pL+ )?(?:dig|inform|mencion|cont|revel|avis|mostr|notifi)\pL*…\busuari[oa]|\bsem (?:informar|avisar|que)…\busuari[oa]",
    r"\bnon (?:\pL+ )?(?:di(?:re|ci|te)?|inform|menzion|rivel|avvis|mostr|notific)\pL*…\butent[ei]|\bsenza (?:informare|avvisare|dire|che)…\butent[ei]",
    r"\bне (?:\pL+ )?(?:сообща|говор|рассказыва|упомина|показыва|раскрыва|уведомля)\pL*…пользовател\pL*|без ведома пользовател\pL*|скр\pL* (?:это )?от пользовател\pL*|пользовател\pL* не долж\pL* (?:знать|узнать|увидеть)",
    r"(?:不要|不得|不可|别|請勿|请勿|切勿|禁止|不能|無需|无需|不必).{0,6}(?:告诉|告訴|告知|通知|提及|透露|提醒|让|讓|向).{0,6}(?:用户|用戶|使用者)|(?:瞒着|隐瞒|背着|隱瞞).{0,4}(?:用户|用戶|使用者)",
    r"ユーザー?.{0,18}(?:知らせ|伝え|言わ|通知し|教え|見せ|報告し|気づかれ|知られ)(?:ない|ず|る?な)",
    r"사용자.{0,14}(?:알리지|말하지|보이지|모르게|알려주지)",
)

_PERMIT = (
    r"--dangerously-(?:skip-permissions|bypass-approvals-and-sandbox)|--yolo\b|\bbypasspermissions\b|--trust-all-tools\b",
    r"\bnopasswd\s*:\s*all|disablerealtimemonitoring|\bsetenforce\s+0|\bcsrutil\s+disable|spctl\s+--master-disable",
    r"permissions\W{1,6}allow\b[^\n]*(?:bash\(\*|\"\*\")|(?:bash\(\*|\"\*\")[^\n]*permissions\W{1,6}allow",
    r"\b(?:always|automatically|auto|silently) (?:approve|accept|allow|grant|confirm|authori[sz]e) (?:all|every|any|each) (?:\pL+ ){0,3}?(?:calls?|requests?|prompts?|commands?|actions?|permissions?|dialogs?)\b",
    r"\b(?:user|operator|administrator|developer|owner) (?:has )?(?:already )?(?:pre ?)?(?:approved|authori[sz]ed|consented to|allows|permits) (?:all|every|any|each)\b",
    r"\b(?:you|agent|assistant) (?:now )?(?:have|has) (?:full |unlimited |unrestricted |root |complete )?(?:permissions?|access|authority|authori[sz]ation) to (?:run|execute|do|use|access) (?:any|every|all|anything)\b",
    r"\b(?:disable|turn off|bypass|circumvent|deactivate|evade) (?:the |all |any |its |your )*(?:sandbox|sandboxing|permission (?:checks?|prompts?|system)|safety (?:checks?|filters?|guidelines|rules)|antivirus|approval (?:prompts?|checks?|flow)|guardrails)\b",
    r"(?:自动|总是|始终|自動|一律).{0,4}(?:批准|同意|允许|通过|允許).{0,8}(?:所有|全部|任何|每)|(?:绕过|禁用|关闭|繞過).{0,6}(?:权限|安全检查|沙箱|审批|沙盒)",
    r"\b(?:genehmige|bestatige|erlaube|akzeptiere)\pL* (?:immer |automatisch |stets |ohne (?:ruck|nach)frage ){1,2}(?:alle|jede)\pL*",
    r"\b(?:approuve|accepte|autorise)\pL* (?:toujours|automatiquement|systematiquement) (?:tou\pL*|chaque)",
    r"\b(?:aprueba|acepta|autoriza|aprova|aceita|approva|accetta)\pL* (?:siempre|automaticamente|sempre) (?:tod|tutt|cada|ogni)\pL*",
    r"(?:всегда|автоматически) (?:одобря|разреша|подтвержда|принима)\pL* (?:все|любые|каждыи)",
    r"(?:すべて|全て|あらゆる).{0,12}(?:自動|常に|確認なし).{0,6}(?:承認|許可)",
)

_UNATTENDED = (
    r"\b(?:never|do not|don t) (?:ask|prompt|request|wait)(?: \pL+){0,2}?(?: for)? (?:any )?(?:approval|permission|confirmation|consent)\b",
    r"\b(?:skip|suppress) (?:all |any |the )*(?:confirmations?|approvals?|permission prompts?|security checks?)\b",
    r"\bwithout asking(?: (?:the )?user)?(?: for)? (?:approval|permission|confirmation|consent)?",
    r"\bauto (?:accept|approve) (?:all|every|any|everything)\b",
    r"(?:跳过|无需|不需要|跳過).{0,4}(?:确认|批准|许可|授权|確認)|\bohne (?:ruckfrage|bestatigung|zustimmung|nachzufragen)|\bsans demander (?:\pL+ ){0,2}?(?:confirmation|autorisation|permission)|\bsin (?:pedir|solicitar) (?:confirmacion|permiso|autorizacion)|без (?:подтверждения|разрешения|согласия)|確認(?:なし|せず)",
    r"(?:add|append|write|insert|edit|modify|put|jq|sed|tee|>>?)\b…\.claude/settings(?:\.local)?\.json",
    r"\bset-executionpolicy\s+(?:-\w+\s+)*(?:bypass|unrestricted)|\bchmod\s+(?:-r\s+)?777\s+/|\bufw\s+disable|\biptables\s+-f\b|--privileged\b|--no-sandbox\b",
)

_FETCHED = (
    rf"\b(?:curl|wget|lynx|aria2c)\b(?:[^\n|;]|\\\n)*\|\s*(?:[a-z0-9_./-]+(?:\s[^\n|;]*)?\|\s*){{0,3}}{SHELL}(?:\s|$|[\"'`;)&])",
    r"\b(?:ba|z|da)?sh\s+(?:-\w+\s+)*[\"']?(?:<\(|\$\(|`)\s*(?:curl|wget)\b[^\n]*",
    r"\b(?:eval|source|\.)\s+[\"']?(?:<\(|\$\(|`)\s*(?:curl|wget)\b[^\n]*|\b(?:python[0-9.]*|perl|ruby|node)\s+-[ce]\s+[\"']?\$\(\s*(?:curl|wget)[^\n]*",
    r"\b(?:iex|invoke-expression)\b[^\n]*(?:downloadstring|\biwr\b|\birm\b|invoke-webrequest|invoke-restmethod|net\.webclient)[^\n]*",
    r"(?:\biwr\b|\birm\b|invoke-webrequest|invoke-restmethod|downloadstring)[^\n]*\|\s*(?:iex|invoke-expression)\b",
    r"\bcertutil\b[^\n]*-urlcache[^\n]*|\bbitsadmin\b[^\n]*/transfer[^\n]*|\bmshta\s+[\"']?(?:https?:|javascript:)|\bregsvr32\b[^\n]*/i:https?",
    r"\b(?:exec|eval)\s*\(\s*[^\n]*(?:urlopen|requests\.get|httpx\.get|urllib|http\.get)[^\n]*",
    r"\bfetch\([^\n]*(?:then\(\s*eval\b|\beval\()|\beval\(\s*await\b[^\n]*|\bimport\(\s*[\"']https?://",
    r"(?:\bcurl\b|\bwget\b)[^\n]*(?:\n|&&|;)\s*(?:sudo\s+)?chmod\s+(?:[ugoa]*\+\w*x|[0-7]{3,4})[^\n;&]*(?:\n|&&|;)\s*(?:sudo\s+)?(?:\./|(?:ba|z)?sh\s)[^\n]*",
    r"(?:\bcurl\b|\bwget\b)[^\n]*http://[^\n]*(?:\n|&&|;)\s*(?:sudo\s+)?(?:chmod\s+(?:\+x|[0-7]{3,4})|(?:ba|z)?sh\s|\./)",
)
_FETCHED_FILE = (
    r"(?:\bcurl\b|\bwget\b|invoke-webrequest|\biwr\b)[^\n]*(?:\n|&&|;)\s*(?:sudo\s+)?(?:chmod\s+(?:\+x|[0-7]{3,4})|(?:ba|z)?sh\s|\./)[^\n]*",
    r"\b(?:pip3?|uv pip)\s+install[^\n]*(?:--(?:extra-)?index-url|--trusted-host|-i)\s+http://|\bnpm\s+(?:i|install)\s[^\n]*http://",
)

_DECODED = (
    rf"\bbase(?:64|32)\s+(?:-d|-di|--decode|-D)\b[^\n|]*\|\s*{SHELL}",
    rf"\b(?:openssl\s+(?:base64|enc)\b[^\n|]*-d|xxd\s+-r|uudecode|rev\b|tr\s+[^\n|]+)[^\n|]*\|\s*{SHELL}",
    r"\b(?:eval|(?:ba|z)?sh\s+-c)\s+[\"']?(?:\$\(|`)[^\n]*(?:base64|xxd|openssl|\brev\b)",
    r"\b(?:exec|eval|os\.system|subprocess\.\w+|__import__)\s*\(\s*[^\n]*(?:b64decode|a85decode|b32decode|b85decode|unhexlify|fromhex|codecs\.decode|zlib\.decompress|marshal\.loads)",
    r"\b(?:eval|function|settimeout|exec(?:sync)?|runinthiscontext)\s*\(\s*[^\n]*(?:atob|buffer\.from|unescape|decodeuricomponent|fromcharcode)\s*\(",
    r"\b(?:powershell|pwsh)(?:\.exe)?\b[^\n]*\s-e(?:n|nc|nco\w*|c)?\s+[a-z0-9+/=]{16,}|frombase64string[^\n]*(?:iex|invoke-expression)|(?:iex|invoke-expression)[^\n]*frombase64string",
    rf"\b(?:printf|echo)\s+(?:-\w+\s+)?[$]?[\"'](?:\\+x[0-9a-f]{{2}}|\\+[0-7]{{3}}){{4,}}[^\n]*\|\s*{SHELL}|\$\'(?:\\x[0-9a-f]{{2}}){{4,}}",
    r"\b(?:eval|assert)\s*\(\s*(?:gzinflate|base64_decode|str_rot13|gzuncompress)",
    r"\b(?:decode|decrypt|decipher|unscramble|rot13|dekodiere|decodifica|decode[zr])\b[^\n]*\b(?:follow it|do what|obey|execute|and run|carry (?:it )?out|then follow|and follow)\b",
)

_SOURCES = (
    r"(?:~|\$\{?home\}?|%userprofile%|/root|/home/\S{1,40}|home\(\)|expanduser|env\.home|homedir\(\)|userprofile)[^\n]*\.(?:ssh|aws|gnupg|kube|docker/config|npmrc|netrc|pypirc|git-credentials|config/gcloud|config/gh|azure|bash_history|zsh_history|mozilla|config/google-chrome|password-store|pgpass|electrum|ethereum|config/solana)\b",
    r"\bid_(?:rsa|ed25519|ecdsa|dsa)\b|\.aws/credentials|/etc/shadow\b|\.git-credentials\b|wallet\.dat\b",
    r"login\.keychain|security\s+(?:find|dump)-\w+|cookies\.sqlite|key4\.db|\b(?:browser|chrome|firefox|session) (?:cookies|passwords)\b|\bsaved passwords\b|\bpassword (?:store|manager) (?:export|dump)",
    r"169\.254\.169\.254/|metadata\.google\.internal/|\bgh\s+auth\s+token\b",
    r"(?:\b(?:cat\s+[^>\s]|read|open|load|collect|gather|copy|lies|lee|lis|lisez|leia|leggi|include)\b|прочита\pL*|读取|讀取)[^\n.;]*\.env\b|@\.env\b|readfile\w*\([^\n]*\.env\b|(?:open|path)\([\"'][^\"']*\.env[\"']|\.env\b.{0,6}(?:読|读)",
    r"\bprintenv\b|(?:^|[;&|(]\s*)env\s*\||dict\(os\.environ\)|=\s*os\.environ\b\s*[,)]|os\.environ\.(?:copy|items)\(|stringify\(process\.env\)|\$\(env\)|\b(?:all|entire|every|full|whole) (?:of )?(?:the )?environment (?:variables?)?\b|get-childitem\s+env:",
    r"\b(?:seed|recovery) phrase\b|\b(?:contents?|value) of \S{0,6}\w*(?:api_key|token|secret|password)\w*|\bd=(?:secret|token|key)\b",
)

_OUT = (
    r"\bcurl\b[^\n]*(?:\s-d\b|--data|\s-f\s|--form|\s-t\s|--upload-file|-x\s*(?:post|put)|-d@|=@)|\bwget\b[^\n]*--(?:post|body)",
    r"\b(?:requests|httpx|aiohttp|session|client|axios|http|got)\.(?:post|put|patch)\s*\(|method\W{1,4}(?:post|put)\b|urlopen\([^\n]*data|invoke-(?:webrequest|restmethod)[^\n]*post|\bsendbeacon\(",
    r"\b(?:nc|ncat|netcat|socat)\s+(?:-\w+\s+)*[a-z0-9.-]+[ :]\d+|/dev/tcp/|\b(?:nslookup|dig|host|ping)\s[^\n]*(?:\$\(|`)|\bsmtplib\b|\bsendmail\b|\b(?:scp|rsync)\b[^\n]*@\S+:",
    r"\b(?:send|upload|post|transmit|forward|e?mail|exfiltrate|submit|deliver|push|copy|add|append|report|sende|schicke|lade|ubertrage|envoie|envoyer|transmets|televerse|envia|envie|enviar|sube|manda|invia|carica)\w*\b[^\n]*(?:https?://|\S+@\S+\.\w)",
    r"(?:отправ|загруз|перешл|переда|envi[ae])\pL*[^\n]*https?://|(?:发送|上传|发到|提交|傳送|上傳)[^\n]*https?://|https?://[^\n]*(?:送信|アップロード|投稿)",
    r"!\[[^\]\n]*\]\(https?://[^)\s]+[?&][^)\s]*=",
)

_OUTSIDE = (
    r"(?:>>?|\btee\b|\bcp\b|\bmv\b|\bsed\s+-i|\bln\b|add-content|out-file)[^\n]*\.(?:bashrc|zshrc|profile|bash_profile|zprofile|zshenv|config/fish/config\.fish)\b",
    r"\.(?:bashrc|zshrc|bash_profile|zprofile|profile)[\"'][\s\S]*?(?:write_text|\.write\(|appendfile|writefile|open\([^)\n]*[\"'][aw])|open\([^)\n]*\.(?:bashrc|zshrc|profile|bash_profile)[^)\n]{0,10}[\"'],\s*[\"'][aw]",
    r"(?:>>?|\btee\b|\bcp\b|\binstall\b)\s[^\n]*/etc/(?:sudoers|passwd|hosts|ld\.so|profile|environment|systemd|init|rc)\S*",
    r"(?:>>?|\btee\b|\bcp\b|\bmv\b|\bln\s+-s\w*|\binstall\b|write_text|writefile)[^\n]*\.git/hooks/|\.git/hooks/\S+[\"'][^\n]*(?:write|open)|git\s+config\s+--global\s+(?:core\.(?:hookspath|sshcommand|pager)|alias|credential)",
    r"\bsystemctl\s+(?:--user\s+)?enable\b|\bregister-scheduledtask\b|~/\.config/(?:autostart|systemd)/",
    r"(?:>>|\btee\s+-a)\s*[\"']?(?:~|\$\{?home\}?)/(?:\.claude/claude|\.codex/agents|claude|agents)\.md",
)
_PERSISTS = (
    r"(?:>>?|\btee\b|\bcp\b|\becho\b|write|append)[^\n]*authorized_keys\b|authorized_keys[\"'][^\n]*(?:write|append|open)",
    r"\|\s*crontab\b|\bcrontab\s+-\s*(?:$|[<\n])|\bcrontab\s+[/\w.]+\s*$|(?:>>?|\btee\b|\bcp\b)[^\n]*/etc/cron",
    r"(?:\bcp\b|\bmv\b|>>?|\btee\b|write)[^\n]*launch(?:agents|daemons)/|\blaunchctl\s+(?:load|bootstrap)\b|\bschtasks\b[^\n]*/create|currentversion\\+run\b|start menu\\+programs\\+startup",
)
_DESTROYS = (
    r"\brm\s+(?:-\w+\s+)*-\w*(?:rf|fr)\w*\s+(?:--no-preserve-root\s+)?[\"']?(?:/|~|\$\{?home\}?|/\*)[\"']?(?:\s|$|;|&|\*|`)",
    r"\bmkfs\.\w+\s+/dev/|\bdd\b[^\n]*of=/dev/(?:sd|nvme|disk)|:\(\)\s*\{\s*:\|:&\s*\};:|\bvssadmin\s+delete\s+shadows|\bshred\b[^\n]*~/|remove-item\b[^\n]*-recurse[^\n]*(?:c:\\+|\$home|\$env:userprofile)[\"']?\s*$",
)

_TOOLS = r"^\s*allowed[-_]tools\s*:(?:[^\n]*\n\s*-)*[^\n]*?"

_TABLE: Final = """
tag_characters | hidden text | high | Tag characters write text that no font shows and models read. | Remove them; nothing but some flags needs them.
variation_text | hidden text | high | A run of variation selectors carries bytes that no font shows. | Remove them; a letter has one at most.
invisible_characters | hidden text | medium | Characters without width part words for readers of text, or carry a code. | Remove them.
bidirectional_characters | hidden text | high | Characters that turn the direction of text show another order than models read. | Remove them, or keep them to text in scripts that run from right to left.
terminal_controls | hidden text | medium | Control characters change what a terminal shows. | Remove them.
mixed_letters | hidden text | medium | Letters of another script stand in for Latin ones within a word. | Write each word in one script.
far_text | hidden text | medium | Text stands far below or right of what a reader looks at. | Move it to where it is read, or remove it.
encoded_text | hidden text | high | Encoded text says, once it is decoded, what another rule finds. | Write it plainly, or remove it.
hidden_instructions | hidden instructions | medium | A comment or unseen element, which a page does not show, tells a model what to do. | Say it where readers see it, or remove it.
ignore_instructions | imitation and override | high | It asks a model to drop instructions that hold. | Remove it; a skill adds instructions and replaces none.
role_override | imitation and override | high | It gives a model another role, without its limits. | Remove it.
prompt_imitation | imitation and override | high | It imitates the structure of a prompt or words of the system. | Remove it; show tokens of templates in code only.
hide_from_user | orders against the user | medium | It asks a model to keep something from the person it works for. | Remove it; what a skill does may be told.
widen_permissions | orders against the user | high | It asks for more rights than a person has given. | Remove it; ask for single tools in `allowed-tools`.
unattended | orders against the user | low | It asks a model to go on without a person's consent, or loosens a wall. | Let people be asked about what cannot be undone.
download_and_run | running what is fetched | high | It runs what a server sends, whatever that is today. | Ship the program with the skill, or fetch a version and compare its digest.
download_file | running what is fetched | medium | It makes a fetched file a program. | Compare its digest before it runs.
decode_and_run | running what is decoded | high | It runs what is only readable once it is decoded. | Ship the program as it is.
credential_read | credentials | low | It reads credentials of the person, or the whole environment. | Name the one secret that is needed, and take it from the caller.
credentials_sent | credentials | high | It reads credentials and, near by, sends something out. | Send nothing of what was read; name hosts and data.
request_catcher | ways out | medium | It speaks to a host where anybody collects what is sent, or fetches what anybody wrote. | Use a host of the project.
raw_address | ways out | medium | It speaks to a bare or disguised address, whose owner nobody can tell. | Use a name that belongs to the project.
secret_in_file | secrets in files | high | A file holds what looks like a real secret. | Revoke it, and take it from the environment.
broad_tools | over-broad tools | high | `allowed-tools` lets it run or write anything without a person being asked. | Name single commands and folders, such as `Bash(git status:*)`.
writes_outside | writing outside | medium | It writes to files of the account or the machine, outside the skill's work. | Leave it to the person, and say what to write.
persistence | writing outside | high | It makes something run later, or lets somebody in later. | Remove it.
destruction | writing outside | high | It removes what cannot be brought back. | Name the folder that is removed, below the working folder.
install_hook | install hooks | high | Installing or opening the folder runs code of it. | Remove the hook; let people start what they want to run.
client_hook | install hooks | medium | It brings hooks or settings that a client obeys on its own. | Leave hooks and settings of clients to their owners.
executable_file | programs and archives | high | A compiled program, which nobody can read. | Ship the source, or name a package.
archive_file | programs and archives | medium | An archive; what is in it was not read. | Put its files into the skill's folder.
document_file | programs and archives | info | A document of another program; what is in it was not read. | Open it with care; it may hold text and macros.
binary_file | programs and archives | low | A file of an unknown kind; it was not read. | Remove it, or say what it is for.
link_or_device | not read | medium | A link, device or pipe; it was not followed. | Put the file itself there.
not_read | not read | medium | A file, or a part of it, was not read. | Make it smaller, or look at it yourself.
odd_encoding | not read | low | A text is no UTF-8, and readers may see other words in it. | Save it as UTF-8.
"""
"""Id, family, severity, why and cure of every rule, in the order of the reference."""

_PATTERNS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "ignore_instructions": _IGNORE,
        "role_override": _ROLE,
        "prompt_imitation": _TOKENS,
        "hide_from_user": _HIDE,
        "widen_permissions": _PERMIT,
        "unattended": _UNATTENDED,
        "download_and_run": _FETCHED,
        "download_file": _FETCHED_FILE,
        "decode_and_run": _DECODED,
        "credential_read": _SOURCES,
        "request_catcher": (HOSTS_OF_CATCHERS,),
        "raw_address": (
            r"https?://(?:\d{1,3}\.){3}\d{1,3}\b",
            r"https?://(?:\d{8,10}|0x[0-9a-f]{6,8}|(?:0x?[0-9a-f]{1,4}\.){3}0x?[0-9a-f]{1,4})(?:[/:?\s\"']|$)",
            r"/dev/tcp/(?:\d{1,3}\.){3}\d{1,3}",
        ),
        "secret_in_file": (
            r"\bAKIA[0-9A-Z]{16}\b|\bASIA[0-9A-Z]{16}\b",
            r"\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_[A-Za-z0-9_]{40,}",
            r"\bglpat-[A-Za-z0-9_-]{20,}",
            r"\bsk-(?:ant|proj|svcacct)-[A-Za-z0-9_-]{24,}|\bsk-[A-Za-z0-9]{40,}\b",
            r"\bxox[abposr]-[A-Za-z0-9-]{20,}",
            r"\bAIza[0-9A-Za-z_-]{35}\b",
            r"\b[rs]k_live_[0-9A-Za-z]{20,}",
            r"\bnpm_[A-Za-z0-9]{36}\b",
            r"\bhf_[A-Za-z]{34}\b",
            r"\bpypi-[A-Za-z0-9_-]{60,}",
            r"\bSG\.[\w-]{20,}\.[\w-]{40,}",
            r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY(?: BLOCK)?-----\s+(?:[A-Za-z-]+: [^\n]+\n)*\s*[A-Za-z0-9+/=\s]{40,}",
        ),
        "broad_tools": (
            _TOOLS
            + r"(?:\bbash\(\s*(?:\*|:\*|\*:\*)\s*\)|[\s\"'\[,:](?:\*)(?:[\s\"',\]]|$)|(?:write|edit|read|multiedit)\(\s*(?:/|//|~/|~|\*)?\*{1,2}\s*\)|\bbash\(\s*(?:sudo|bash|sh|zsh|eval|su|rm)\b)",
        ),
        "writes_outside": _OUTSIDE,
        "persistence": _PERSISTS,
        "destruction": _DESTROYS,
    }
)
_NEAR: Final[Mapping[str, str]] = MappingProxyType(
    {
        "hide_from_user": rf"\b{DID}\b|kopier|\bcopi(?:ado|ee|eron|aron)|envoy|送信|コピー|скопирова|读取|上传|发送|upload|\bthis (?:step|action|script)|\bsecret\b|if asked|knowledge|must not (?:know|learn)",
        "unattended": r"bash\(\*|permissions\.allow|defaultmode|all prompts|disable the sandbox",
        "request_catcher": _SENDS,
        "raw_address": _SENDS + r"|\bopen http|/dev/tcp/",
    }
)


def _rules() -> Iterator[Rule]:
    for row in _TABLE.strip().splitlines():
        name, family, severity, why, cure = row.split(" | ")
        level: Any = severity
        yield Rule(
            name, family, level, why, cure, _PATTERNS.get(name, ()), _NEAR.get(name, ""), name == "secret_in_file"
        )


RULES: Final[Mapping[str, Rule]] = MappingProxyType({rule.id: rule for rule in _rules()})
"""Every rule by its id, in the order of the table."""

WAYS_OUT: Final = _OUT
"""What sends data somewhere: no finding by itself, and `credentials_sent` beside `credential_read`."""

NOT_A_SOURCE: Final = r"(?:ssh|scp|rsync|sftp)\s+[^\n]*-i\b|ssh-(?:keygen|add|copy-id)|--?kubeconfig|known_hosts|key_path|authorization:|\.pub\b|\bchmod\b|docker/config\.json\S*:ro"
"""Lines on which a credential's file is only used as it is meant to be."""

DIRECTED: Final = (
    r"\b(?:ai|agents?|assistants?|models?|llms?|claude|gpt|codex|gemini|copilot|you (?:must|should|are)|when you read|before anything else|system note)\b"
    r"[\s\S]*?\b(?:run|execute|call|send|upload|read|append|ignore|disregard|skip|delete|copy|install|fetch|curl|open|post|follow|never|silently|do not|add)\b"
    r"|\b(?:do not|don t|never) (?:tell|mention|say|show)\b"
)
"""What tells a comment to a model from a note to people."""

KNOWN_INSTALLERS: Final = (
    r"https://(?:sh\.rustup\.rs|astral\.sh|get\.docker\.com|deno\.land|bun\.(?:sh|com)|get\.pnpm\.io|install\.python-poetry\.org"
    r"|raw\.githubusercontent\.com/(?:homebrew|nvm-sh|helm|pyenv|ohmyzsh|k3d-io|aquasecurity|anchore|sdkman|kubernetes\S*|rancher|golangci|dotnet|conda-forge)/"
    r"|get\.helm\.sh|deb\.nodesource\.com|rpm\.nodesource\.com|ollama\.(?:com|ai)|claude\.ai|fly\.io|get\.k3s\.io|get\.sdkman\.io"
    r"|sdk\.cloud\.google\.com|aka\.ms|dot\.net|cli\.github\.com|rclone\.org|starship\.rs|mise\.(?:run|jdx\.dev)|nixos\.org"
    r"|install\.determinate\.systems|get\.volta\.sh|pyenv\.run|bootstrap\.pypa\.io|github\.com/(?:conda-forge|homebrew)|just\.systems"
    r"|cursor\.com|opencode\.ai|foundry\.paradigm\.xyz|get\.scoop\.sh|chocolatey\.org|community\.chocolatey\.org|tailscale\.com|pixi\.sh|micro\.mamba\.pm|dl\.k8s\.io)"
)
"""Addresses of installers that everybody knows; running what they send is common, and told as `low`."""

DISCUSSED: Final = (
    r"attack|inject|malicious|malware|exploit|payload|threat|vulnerab|adversar|jailbreak|red flags?|red[ -]team|suspicious|hostile|phishing"
    r"|untrusted|dangerous|insecure|unsafe|anti-?pattern|blocklist|denylist|forbidden|prohibited|detect|scanner|sanitiz|incident|exfiltrat"
    r"|\bbad\b|\bavoid\b|never do|do not do|chat ?template|chatml|tokenizer|special tokens|angriff|ataque|attaque|атак|攻击|攻擊|攻撃|注入|恶意"
)
"""Words by which a heading or the lines before tell that something is quoted to be known, not to be done."""

INTRODUCED: Final = (
    r"(?:such as|like|e g|for example|phrases?|says?|saying|tries to|try to|attempts? to|asks? you to|tell(?:s|ing)? you to|claims?|patterns?|strings?"
    r"|never|do not|don t|did not|does not|avoid|refuse|reject|detect|flag|watch for|look for|beware|instead of|rather than|contains?|warn\w*|must not|is not|prevent\w*|block\w*) ?(?:\S+ ){0,6}$"
)
"""What before something in a sentence says that it is spoken about."""

STAND_INS: Final = (
    r"(?i)example|xxxx|0000000|1234567|abcdef|your|placeholder|dummy|fake|sample|redacted|test|\.\.\.|<|\*\*\*"
)
"""What a made-up secret of documentation has."""

CONCEALED: Final = (
    r"(?ms)<!--.*?(?:-->|\z)|^\[(?://|comment)\]:[^\n]+"
    r"|<\w+[^>\n]*(?:display:\s*none|visibility:\s*hidden|font-size:\s*0|opacity:\s*0[;\"']|color:\s*(?:white|transparent|#fff)"
    r"|\shidden\b)[^>\n]*>[^<]*"
)
"""Comments and unseen elements, in lower case."""

_QUOTING: Final = r"(?:[\"'\\^`]|\$[@*]|\$\{\w*\}|\$\(\))"
_PARTED: Final = "|".join(
    f"{word[:cut]}{_QUOTING}+{f'{_QUOTING}*'.join(word[cut:])}"
    for word in ("curl", "wget", "bash", "zsh", "sh", "eval", "base64", "python", "iex", "chmod")
    for cut in range(1, len(word))
)
PARTED: Final = re.compile(rf"\b(?:{_PARTED})\b")
"""Names of programs with quotes, escapes or empty variables between their letters, which a shell leaves out."""

ENCODED: Final = (
    r"(?P<base64>[A-Za-z0-9+/_-]{24,}={0,2})|(?P<escapes>(?:\\x[0-9a-fA-F]{2}){6,}|(?:\\u[0-9a-fA-F]{4}){6,})"
    r"|(?P<percent>(?:%[0-9a-fA-F]{2}){6,})|(?P<entities>(?:&#x?[0-9a-fA-F]{2,6};){6,})"
    r"|(?P<apart>(?:\b[A-Za-z][ ._*-]){8,}[A-Za-z]\b)|(?P<parts>[\"'] ?\+ ?[\"'])"
    rf"|(?P<parted>{PARTED.pattern})"
)

OWN_NETWORKS: Final = re.compile(r"(?:127\.|10\.|0\.0\.0\.0|192\.168\.|172\.(?:1[6-9]|2\d|3[01])\.|169\.254\.|255\.)")

RUN_BY_INSTALLING: Final = re.compile(
    r"cmdclass|os\.(?:system|popen)|subprocess|urlopen|requests\.|\b(?:exec|eval)\(|socket\b"
)

CLIENT_FILES: Final = re.compile(
    r"(?:^|/)(?:\.claude/settings(?:\.local)?\.json|hooks/hooks\.json|\.mcp\.json|\.cursor/mcp\.json)$"
)

STARTED_FILES: Final = re.compile(
    r"(?:^|/)(?:sitecustomize\.py|usercustomize\.py|binding\.gyp|extconf\.rb|[^/]+\.pth)$"
)

FRONT_HOOKS: Final = r"---\n(?:[^\n]+\n)*?hooks:\s*\n(?:\s+[^\n]*\n)*?\s+(?:- )?(?:type:\s*)?command\b"


PROSE_FILES: Final = frozenset({".md", ".markdown", ".mdx", ".txt", ".rst", ".adoc", ".html", ".htm", ""})
CODE_FILES: Final = frozenset(
    {
        ".py",
        ".sh",
        ".bash",
        ".zsh",
        ".js",
        ".mjs",
        ".cjs",
        ".ts",
        ".ps1",
        ".rb",
        ".pl",
        ".php",
        ".bat",
        ".cmd",
        ".lua",
        ".fish",
    }
)

MAGICS: Final[tuple[tuple[bytes, int, str, str], ...]] = (
    (b"\x7fELF", 0, "executable_file", "a program of Linux (ELF)"),
    (b"MZ", 0, "executable_file", "a program of Windows (PE)"),
    *(
        (bytes.fromhex(magic), 0, "executable_file", "a program of macOS (Mach-O) or Java")
        for magic in ("feedface", "feedfacf", "cefaedfe", "cffaedfe", "cafebabe")
    ),
    (b"\0asm", 0, "executable_file", "WebAssembly"),
    (b"PK\x03\x04", 0, "archive_file", "a zip archive"),
    (b"PK\x05\x06", 0, "archive_file", "a zip archive without files"),
    (b"\x1f\x8b", 0, "archive_file", "gzip"),
    (b"BZh", 0, "archive_file", "bzip2"),
    (b"\xfd7zXZ\0", 0, "archive_file", "xz"),
    (b"\x28\xb5\x2f\xfd", 0, "archive_file", "zstandard"),
    (b"7z\xbc\xaf\x27\x1c", 0, "archive_file", "a 7z archive"),
    (b"Rar!\x1a\x07", 0, "archive_file", "a RAR archive"),
    (b"ustar", 257, "archive_file", "a tar archive"),
    (b"%PDF-", 0, "document_file", "a PDF"),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", 0, "document_file", "a document of older Office programs"),
    (b"\x89PNG\r\n", 0, "", ""),
    (b"\xff\xd8\xff", 0, "", ""),
    (b"GIF8", 0, "", ""),
    (b"RIFF", 0, "", ""),
    (b"wOF2", 0, "", ""),
    (b"wOFF", 0, "", ""),
    (b"\0\x01\0\0", 0, "", ""),
    (b"OTTO", 0, "", ""),
    (b"\0\0\x01\0", 0, "", ""),
)
"""First bytes of files that are no text: where they stand, the rule, empty for pictures and fonts, and what it is."""
